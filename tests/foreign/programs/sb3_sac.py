"""Three Adam optimizers, an averaged critic and a learned temperature."""

from stable_baselines3 import SAC

SAC("MlpPolicy", "Pendulum-v1", learning_starts=100, batch_size=64, seed=0, device="cpu").learn(500)
