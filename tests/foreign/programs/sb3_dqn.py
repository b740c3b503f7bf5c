"""Off-policy reinforcement learning with a target network."""

from stable_baselines3 import DQN

model = DQN("MlpPolicy", "CartPole-v1", learning_starts=100, train_freq=4, target_update_interval=200, seed=0, device="cpu")
model.learn(3000)
