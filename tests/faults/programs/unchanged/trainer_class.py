"""Keep everything in a class, with an averaged model, tqdm, accumulation and a meter."""

import torch
from digits import dataset, digest, network
from torch.utils.data import DataLoader
from tqdm import tqdm


class AverageMeter:
    def __init__(self):
        self.reset()

    def reset(self):
        self.sum = 0.0
        self.count = 0

    def update(self, value, n=1):
        self.sum += value * n
        self.count += n

    @property
    def avg(self):
        return self.sum / self.count


class EMA:
    def __init__(self, model, decay):
        self.decay = decay
        self.shadow = {name: p.detach().clone() for name, p in model.named_parameters()}

    def update(self, model):
        for name, p in model.named_parameters():
            self.shadow[name].mul_(self.decay).add_(p.detach(), alpha=1 - self.decay)


class Trainer:
    def __init__(self):
        torch.manual_seed(3)
        self.model = network()
        self.ema = EMA(self.model, 0.9)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 40)
        self.loader = DataLoader(dataset(), batch_size=4, shuffle=True, num_workers=2)
        self.validation = DataLoader(dataset(64, seed=1), batch_size=16)
        self.global_step = 0
        self.losses = AverageMeter()
        self.history = {"train": [], "valid": []}

    def train_epoch(self, epoch):
        self.model.train()
        self.losses.reset()
        for i, (inputs, labels) in enumerate(tqdm(self.loader, desc=f"epoch {epoch}")):
            loss = torch.nn.functional.cross_entropy(self.model(inputs), labels) / 2
            loss.backward()
            self.losses.update(loss.item(), len(labels))
            if (i + 1) % 2 == 0:
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.scheduler.step()
                self.ema.update(self.model)
                self.global_step += 1
        self.history["train"].append(self.losses.avg)

    @torch.no_grad()
    def validate(self):
        self.model.eval()
        losses = AverageMeter()
        for inputs, labels in self.validation:
            losses.update(torch.nn.functional.cross_entropy(self.model(inputs), labels).item())
        self.history["valid"].append(losses.avg)

    def fit(self, epochs):
        for epoch in range(epochs):
            self.train_epoch(epoch)
            self.validate()
            print("epoch", epoch, self.history["train"][-1], self.history["valid"][-1])


trainer = Trainer()
trainer.fit(3)
total = sum(value.double().sum().item() for value in trainer.ema.shadow.values())
print("digest", digest(trainer.model), trainer.global_step, trainer.history, total)
