"""Spiking neurons: hidden state that modules keep, surrogate gradients, one call for an epoch."""

import snntorch as snn
import torch
from snntorch import backprop
from snntorch import functional as spikes

torch.manual_seed(0)
net = torch.nn.Sequential(
    torch.nn.Linear(8, 16),
    snn.Leaky(0.9, init_hidden=True),
    torch.nn.Linear(16, 2),
    snn.Leaky(0.9, init_hidden=True, output=True),
)
x = torch.rand(64, 8)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, (x[:, 0] > 0.5).long()), 16)
optimizer = torch.optim.Adam(net.parameters(), 1e-2)
for _ in range(6):
    loss = backprop.BPTT(
        net, loader, num_steps=8, optimizer=optimizer, criterion=spikes.ce_rate_loss(), time_var=False, device="cpu"
    )
    print(float(loss))
