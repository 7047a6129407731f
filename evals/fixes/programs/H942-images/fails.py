import numpy
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

Image.new("RGB", (32, 32), "red").save("red.png")
Image.new("L", (32, 32), 128).save("gray.png")


class Pictures(Dataset):
    files = ("red.png", "gray.png")

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        image = Image.open(self.files[index])
        pixels = torch.from_numpy(numpy.array(image)).float() / 255
        return pixels.reshape(32, 32, -1).permute(2, 0, 1)


for images in DataLoader(Pictures(), batch_size=2):
    print("batch of", tuple(images.shape))
