"""Lightning's DDPStrategy with a fastsync hook: gradients travel as float16 that cannot overflow.

torchrun --standalone --nproc-per-node=2 examples/lightning_ddp.py
python examples/lightning_ddp.py
"""

import os

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fastsync
from fastsync.distributed import process_group

try:
    import lightning
    from lightning.pytorch.strategies import DDPStrategy
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


class RegisterHookOnCPU(lightning.Callback):
    """Not for GPUs: on CUDA Lightning 2.6 hands ddp_comm_hook to DDP, on a CPU it drops it without a word."""

    def on_train_start(self, trainer, module):
        if trainer.strategy.root_device.type == "cpu":
            trainer.strategy.model.register_comm_hook(module.hook_state, fastsync.fp16_compress_hook)


def main():
    lightning.seed_everything(0, verbose=False)
    inputs = torch.randn(4096, 16)
    data = TensorDataset(inputs, inputs[:, :4].sin().sum(dim=1, keepdim=True))
    model = Regression()
    first_loss = model.loss(*data.tensors).item()

    # The state may be left out; it is there for its statistics. It belongs to a process group, so one has to be open:
    # Lightning takes the one it finds, and opens its own where there is none.
    with process_group(timeout=60) as device:
        model.hook_state = fastsync.HookState()
        trainer = lightning.Trainer(
            accelerator=device.type,
            devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
            strategy=DDPStrategy(ddp_comm_hook=fastsync.fp16_compress_hook, ddp_comm_state=model.hook_state),
            callbacks=[RegisterHookOnCPU()],
            max_epochs=4,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        # Lightning gives every rank another part of the data.
        trainer.fit(model, DataLoader(data, batch_size=64, shuffle=True))
        fastsync.check_consistency(model)

        stats = model.hook_state.stats()
        if trainer.is_global_zero:
            loss = model.cpu().loss(*data.tensors).item()
            sent = f"{stats.num_steps} steps of {stats.numel} gradients in {stats.wire_bytes} bytes"
            print(f"loss {first_loss:.3f} -> {loss:.3f}; {sent}")


if __name__ == "__main__":
    main()
