# expect: rate-not-adjusted line 45 or 54
"""Lightning with an optimization of one's own: two optimizers, stepped in turn."""

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class AutoEncoderWithCritic(L.LightningModule):
    def __init__(self, width=128, per_process_lr=1e-4):
        super().__init__()
        self.automatic_optimization = False
        self.per_process_lr = per_process_lr
        self.encoder = nn.Sequential(nn.Linear(256, width), nn.ReLU(), nn.Linear(width, 16))
        self.decoder = nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, 256))
        self.critic = nn.Sequential(nn.Linear(256, width), nn.LeakyReLU(0.2), nn.Linear(width, 1))

    def training_step(self, batch, batch_idx):
        (x,) = batch
        main, critic = self.optimizers()

        self.toggle_optimizer(main)
        rebuilt = self.decoder(self.encoder(x))
        loss = nn.functional.mse_loss(rebuilt, x) - 0.01 * self.critic(rebuilt).mean()
        main.zero_grad()
        self.manual_backward(loss)
        main.step()
        self.untoggle_optimizer(main)

        self.toggle_optimizer(critic)
        real, fake = self.critic(x), self.critic(rebuilt.detach())
        critic_loss = nn.functional.relu(1 - real).mean() + nn.functional.relu(1 + fake).mean()
        critic.zero_grad()
        self.manual_backward(critic_loss)
        critic.step()
        self.untoggle_optimizer(critic)
        self.log_dict({"loss": loss, "critic": critic_loss}, sync_dist=True, on_step=False, on_epoch=True)

    def on_train_epoch_end(self):
        for scheduler in self.lr_schedulers():
            scheduler.step()

    def configure_optimizers(self):
        lr = self.per_process_lr
        body = [*self.encoder.parameters(), *self.decoder.parameters()]
        optimizers = [torch.optim.Adam(body, lr), torch.optim.Adam(self.critic.parameters(), lr)]
        return optimizers, [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95) for optimizer in optimizers]


if __name__ == "__main__":
    torch.manual_seed(0)
    data = TensorDataset(torch.rand(8192, 256))
    loader = DataLoader(data, batch_size=64, shuffle=True, drop_last=True)  # for each process
    trainer = L.Trainer(devices=2, accelerator="cpu", strategy="ddp_find_unused_parameters_true", max_epochs=10)
    trainer.fit(AutoEncoderWithCritic(), loader)
    trainer.save_checkpoint("autoencoder.ckpt")
