"""Segmentation with a Dice loss on MONAI's engine."""

import torch
from monai.data import DataLoader, Dataset
from monai.engines import SupervisedTrainer
from monai.losses import DiceLoss
from monai.networks.nets import UNet
from monai.utils import set_determinism

set_determinism(0)
net = UNet(2, 1, 1, (4, 8, 16), (2, 2))
images = [torch.rand(1, 32, 32) for _ in range(16)]
rows = [{"image": image, "label": (image > 0.5).float()} for image in images]
SupervisedTrainer(
    device=torch.device("cpu"),
    max_epochs=6,
    train_data_loader=DataLoader(Dataset(rows), batch_size=4, num_workers=0),
    network=net,
    optimizer=torch.optim.Adam(net.parameters(), 1e-2),
    loss_function=DiceLoss(sigmoid=True),
).run()
