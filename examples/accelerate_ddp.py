"""Accelerate with a fastsync hook: gradients travel as float16 that cannot overflow.

    torchrun --standalone --nproc-per-node=2 examples/accelerate_ddp.py
    python examples/accelerate_ddp.py

`accelerate launch` starts it as well. One line is needed, after accelerator.prepare().
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fastsync
from fastsync.distributed import process_group

try:
    from accelerate import Accelerator, DistributedDataParallelKwargs
    from accelerate.utils import set_seed
except ImportError:
    raise SystemExit("this example needs Accelerate: pip install accelerate") from None


def main(device):
    set_seed(0)
    # comm_hook, among these options, is an enum of torch's own hooks, and stays unset. DDP's others are set as ever.
    options = DistributedDataParallelKwargs(gradient_as_bucket_view=True)
    accelerator = Accelerator(cpu=device.type == "cpu", kwargs_handlers=[options])

    inputs = torch.randn(4096, 16)
    targets = inputs[:, :4].sin().sum(dim=1, keepdim=True)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    loader = DataLoader(TensorDataset(inputs, targets), batch_size=64, shuffle=True)
    # Gives every rank another part of the data.
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    handle = fastsync.register_prepared(model, "fp16")  # the line

    losses = []
    for _ in range(4):
        for batch, wanted in loader:
            loss = nn.functional.mse_loss(model(batch), wanted)
            optimizer.zero_grad()
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(accelerator.gather(loss.detach()).mean().item())

    fastsync.check_consistency(model)
    if accelerator.is_main_process:
        stats = handle.stats()
        sent = f"{stats.num_steps} steps of {stats.numel} gradients in {stats.wire_bytes} bytes"
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; {sent}")


if __name__ == "__main__":
    with process_group(timeout=60) as device:
        main(device)
