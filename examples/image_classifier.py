"""An image classifier as most trainings begin: DistributedSampler, mixed precision, checkpoints, metrics on rank 0.

    torchrun --standalone --nproc-per-node=2 examples/image_classifier.py
    python examples/image_classifier.py

Started again with --checkpoint FILE it goes on after the last epoch that FILE holds. --data shapes makes its images at
run time; digits are scikit-learn's.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import fastsync
from fastsync.distributed import dist_mean, dist_sum, process_group


def digits():
    """1,797 images of 8 x 8 pixels, and which of ten digits they show."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise SystemExit("this example needs scikit-learn, or --data shapes: pip install scikit-learn") from None
    images, labels = load_digits(return_X_y=True)
    return torch.tensor(images / 16, dtype=torch.float32).reshape(-1, 1, 8, 8), torch.tensor(labels)


def shapes():
    """2,000 noisy images of stripes, columns, a frame or a disc."""
    row, column = torch.meshgrid(torch.arange(8.0), torch.arange(8.0), indexing="ij")
    from_centre = (row - 3.5).abs(), (column - 3.5).abs()
    disc, frame = torch.hypot(*from_centre) < 3, torch.maximum(*from_centre) > 3
    drawings = torch.stack([row % 4 < 2, column % 4 < 2, frame, disc]).float()
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(4, (2000,), generator=generator)
    return (drawings[labels] + 0.5 * torch.randn(2000, 8, 8, generator=generator)).unsqueeze(1), labels


def split(images, labels):
    """Four fifths to learn from, and a fifth to be tested on; the same on every rank."""
    shuffled = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    test, train = shuffled.tensor_split([len(labels) // 5])
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def save(path, **state):
    """Whole or not at all: a run that is killed leaves the checkpoint before."""
    torch.save(state, f"{path}.tmp")
    os.replace(f"{path}.tmp", path)


@torch.no_grad()
def accuracy(model, loader, device):
    """Over the images of all ranks."""
    right = torch.zeros(2, dtype=torch.float64, device=device)
    for images, labels in loader:
        is_right = model(images.to(device)).argmax(dim=1) == labels.to(device)
        right += torch.stack([is_right.sum(), torch.tensor(len(labels), device=device)])
    num_right, num = dist_sum(right).tolist()
    return num_right / num


def main(args, device):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    train_set, test_set = split(*{"digits": digits, "shapes": shapes}[args.data]())
    sampler = DistributedSampler(train_set, shuffle=True)  # another part of the data for each rank
    loader = DataLoader(train_set, args.batch_size, sampler=sampler)
    # Not a DistributedSampler: it would count some images twice, so that all ranks get as many.
    tests = DataLoader(torch.utils.data.Subset(test_set, range(rank, len(test_set), world_size)), 256)

    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 10),
    ).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    sync = fastsync.attach(model, compression=args.compression)  # the line

    first_epoch = 0
    if args.checkpoint and os.path.exists(args.checkpoint):
        state = torch.load(args.checkpoint, map_location=device)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        sync.load_state_dict(state["sync"])
        first_epoch = state["epoch"] + 1

    for epoch in range(first_epoch, args.epochs):
        sampler.set_epoch(epoch)  # another order in every epoch
        losses = []
        for images, labels in loader:
            with torch.autocast(device.type, torch.bfloat16):
                loss = nn.functional.cross_entropy(model(images.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()  # when it returns, every .grad is the mean over the ranks
            fastsync.clip_grad_norm_(sync, 1.0)
            optimizer.step()
            losses.append(loss.detach())
        mean_loss = dist_mean(torch.stack(losses).mean()).item()
        right = accuracy(model, tests, device)
        if rank == 0:
            print(f"epoch {epoch + 1}: loss {mean_loss:.6f}, {right:.1%} of the test images right")
            if args.checkpoint:
                # The sync's state is the same on every rank, except with error feedback, which is each rank's own.
                save(
                    args.checkpoint,
                    model=model.state_dict(),
                    optimizer=optimizer.state_dict(),
                    sync=sync.state_dict(),
                    epoch=epoch,
                )
    fastsync.check_consistency(model)


def arguments(words=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", choices=["digits", "shapes"], default="digits")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=32, help="of each rank")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--compression", choices=["none", "bf16", "fp16"], default="fp16")
    parser.add_argument("--checkpoint", help="file to save to after every epoch, and to go on from")
    return parser.parse_args(words)


if __name__ == "__main__":
    args = arguments()
    with process_group(timeout=60) as device:
        main(args, device)
