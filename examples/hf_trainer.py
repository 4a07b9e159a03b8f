"""Hugging Face's Trainer with fastsync's hook, put in by a callback: gradients travel as float16 that cannot overflow.

    torchrun --standalone --nproc-per-node=2 examples/hf_trainer.py
    python examples/hf_trainer.py

The model is a small GPT-2 made from a config, which learns to count; nothing is downloaded.
"""

import tempfile

import torch

import fastsync
from fastsync.distributed import process_group

try:
    from transformers import GPT2Config, GPT2LMHeadModel, PrinterCallback, Trainer, TrainingArguments

    from fastsync.hf_trainer import FastsyncCallback
except ImportError:
    raise SystemExit("this example needs transformers and accelerate: pip install transformers accelerate") from None

NUM_TOKENS = 16
NUM_STEPS = 60


def counting(num=1024, length=12):
    """Sequences that count on from anywhere, in steps of one to three."""
    generator = torch.Generator().manual_seed(0)
    start, step = (torch.randint(low, high, (num, 1), generator=generator) for low, high in ((0, NUM_TOKENS), (1, 4)))
    tokens = (start + step * torch.arange(length)) % NUM_TOKENS
    return [{"input_ids": sequence, "labels": sequence} for sequence in tokens]


def main(device):
    torch.manual_seed(0)
    sizes = {"n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 2}
    config = GPT2Config(vocab_size=NUM_TOKENS, bos_token_id=None, eos_token_id=None, **sizes)
    model = GPT2LMHeadModel(config)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=NUM_STEPS,
            per_device_train_batch_size=16,
            learning_rate=3e-3,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            ddp_find_unused_parameters=False,
            use_cpu=device.type == "cpu",
        )
        trainer = Trainer(model, arguments, train_dataset=counting())
        trainer.remove_callback(PrinterCallback)
        callback = FastsyncCallback(trainer, "fp16")
        trainer.add_callback(callback)  # the line
        trainer.train()

    fastsync.check_consistency(model)
    if trainer.is_world_process_zero():
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        assert callback.handle is not None
        stats = callback.handle.stats()
        sent = f"{stats.num_steps} steps of {stats.numel} gradients in {stats.wire_bytes} bytes"
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; {sent}")


if __name__ == "__main__":
    with process_group(timeout=60) as device:
        main(device)
