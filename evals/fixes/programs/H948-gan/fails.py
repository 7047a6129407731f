import torch

generator = torch.nn.Linear(4, 8)
critic = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
generator_optimizer = torch.optim.SGD(generator.parameters(), lr=0.01)
critic_optimizer = torch.optim.SGD(critic.parameters(), lr=0.01)

fake = generator(torch.randn(16, 4))
scores = critic(fake)
critic_loss = scores.mean()
generator_loss = -scores.mean()

critic_optimizer.zero_grad()
critic_loss.backward(retain_graph=True)
critic_optimizer.step()

generator_optimizer.zero_grad()
generator_loss.backward()
generator_optimizer.step()
print("losses", critic_loss.item(), generator_loss.item())
