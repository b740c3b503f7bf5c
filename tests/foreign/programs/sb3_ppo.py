"""On-policy reinforcement learning with a clipped gradient norm."""

from stable_baselines3 import PPO

PPO("MlpPolicy", "CartPole-v1", n_steps=256, batch_size=64, n_epochs=4, seed=0, device="cpu").learn(2048)
