import lightning
import torch
from torch.utils.data import DataLoader


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 2)

    def training_step(self, batch, _):
        loss = self.layer(batch).square().mean()
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


best = lightning.pytorch.callbacks.ModelCheckpoint(monitor="val_loss")
trainer = lightning.Trainer(
    max_epochs=2, accelerator="cpu", callbacks=[best], logger=False, enable_progress_bar=False
)
trainer.fit(Classifier(), DataLoader(torch.randn(32, 8), batch_size=8))
print("best", best.best_model_score.item())
