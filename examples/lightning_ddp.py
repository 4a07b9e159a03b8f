"""Lightning's DDPStrategy with fastsync's hook, put in by a callback: gradients travel as float16 that cannot overflow.

    torchrun --standalone --nproc-per-node=2 examples/lightning_ddp.py
    python examples/lightning_ddp.py

With "int8+ef" in place of "fp16" they take a byte each, and Lightning's checkpoints keep what error feedback has kept.
"""

import os

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fastsync
from fastsync.distributed import process_group

try:
    import lightning

    from fastsync.integrations.lightning import FastsyncCallback
except ImportError:
    raise SystemExit("this example needs Lightning: pip install lightning") from None


class Regression(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.network = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))

    def loss(self, inputs, targets):
        return nn.functional.mse_loss(self.network(inputs), targets)

    def training_step(self, batch, batch_index):
        return self.loss(*batch)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def main():
    lightning.seed_everything(0, verbose=False)
    inputs = torch.randn(4096, 16)
    data = TensorDataset(inputs, inputs[:, :4].sin().sum(dim=1, keepdim=True))
    model = Regression()
    first_loss = model.loss(*data.tensors).item()

    # Lightning takes the process group that is open, and opens its own where there is none.
    with process_group(timeout=60) as device:
        callback = FastsyncCallback("fp16")  # the line
        trainer = lightning.Trainer(
            accelerator=device.type,
            devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
            strategy="ddp",
            callbacks=[callback],
            max_epochs=4,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        # Lightning gives every rank another part of the data.
        trainer.fit(model, DataLoader(data, batch_size=64, shuffle=True))
        fastsync.check_consistency(model)

        stats = callback.handle.stats()
        if trainer.is_global_zero:
            loss = model.cpu().loss(*data.tensors).item()
            sent = f"{stats.num_steps} steps of {stats.numel} gradients in {stats.wire_bytes} bytes"
            print(f"loss {first_loss:.3f} -> {loss:.3f}; {sent}")


if __name__ == "__main__":
    main()
