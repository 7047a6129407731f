"""Train two networks with two optimizers, and save images at some steps, as the DCGAN example."""

import torch
from digits import dataset, digest
from torch import nn
from torch.utils.data import DataLoader


class Options:
    epochs = 3
    outf = "."


opt = Options()
torch.manual_seed(0)
loader = DataLoader(dataset(), batch_size=8, shuffle=True, num_workers=0)
netG = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8))
netD = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
criterion = nn.BCEWithLogitsLoss()
fixed_noise = torch.randn(5, 4)
optimizerD = torch.optim.Adam(netD.parameters(), lr=2e-3)
optimizerG = torch.optim.Adam(netG.parameters(), lr=2e-3)
for epoch in range(opt.epochs):
    for i, data in enumerate(loader, 0):
        netD.zero_grad()
        real = data[0]
        label = torch.full((real.size(0), 1), 1.0)
        errD_real = criterion(netD(real), label)
        errD_real.backward()
        noise = torch.randn(real.size(0), 4)
        fake = netG(noise)
        label.fill_(0.0)
        errD_fake = criterion(netD(fake.detach()), label)
        errD_fake.backward()
        optimizerD.step()
        netG.zero_grad()
        label.fill_(1.0)
        errG = criterion(netD(fake), label)
        errG.backward()
        optimizerG.step()
        if i % 7 == 0:
            print(f"[{epoch}/{opt.epochs}][{i}] {errD_real.item():.5f} {errG.item():.5f}")
            torch.save(netG(fixed_noise), f"{opt.outf}/fake_{epoch}.pt")
    torch.save(netG.state_dict(), f"{opt.outf}/netG_{epoch}.pth")
print("digest", digest(netG, netD))
