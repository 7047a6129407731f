"""Train as PyTorch's MNIST example does: functions, `enumerate`, a scheduler, a report per epoch."""

import argparse

import torch
import torch.nn.functional as F
from digits import Augmented, dataset, digest, network
from torch.utils.data import DataLoader


def train(args, model, loader, optimizer, epoch):
    model.train()
    for batch_idx, (data, target) in enumerate(loader):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(data), target)
        loss.backward()
        optimizer.step()
        if batch_idx % 5 == 0:
            print(f"epoch {epoch} batch {batch_idx} loss {loss.item():.6f}")


def test(model, loader):
    model.eval()
    test_loss = 0
    correct = 0
    with torch.no_grad():
        for data, target in loader:
            output = model(data)
            test_loss += F.cross_entropy(output, target, reduction="sum").item()
            correct += (output.argmax(1) == target).sum().item()
    print(f"test loss {test_loss / 64:.6f}, correct {correct}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--workers", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(1)
    train_loader = DataLoader(
        Augmented(dataset()), batch_size=8, shuffle=True, num_workers=args.workers
    )
    test_loader = DataLoader(dataset(64, seed=1), batch_size=32)
    model = network()
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    for epoch in range(1, args.epochs + 1):
        train(args, model, train_loader, optimizer, epoch)
        test(model, test_loader)
        scheduler.step()
    torch.save(model.state_dict(), "final.pt")
    print("digest", digest(model))


if __name__ == "__main__":
    main()
