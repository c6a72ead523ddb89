"""A ViT on the blocks of model.py: patches take the place of tokens, and each sees each other.

    images (B, channels, S, S) → patches (B, N, channels · P²) → W patch + b, behind a class token
    (pool=cls)
        → + positions → the blocks of model.py, with the same flags → final norm → class token, or
        mean over the patches → head: logits (B, n_class)

It is the ViT of Dosovitskiy et al. (2021), and V-DNT (DNT, arXiv 2507.17501) with the flags of
config/vdnt/: a ViT, built on timm's (App. C), with four types of norm (sec. 3.3). Class token or
mean: not published. That the final norm acts on every token, before the mean, is our choice.
`python model.py config/vdnt/large.py` prints the network.
"""

import torch
import torch.nn.functional as F

from layers.linear import Embedding, Linear
from layers.ops import upcast
from model import GPTConfig, Transformer


class ViT(Transformer):
    """`model(images, targets, …)` → (None, loss) in training, (logits, loss) in evaluation mode;
    `model(images)` → (logits, None)."""

    def __init__(self, config: GPTConfig, seed: int = 1337):
        super().__init__(config)
        c, d = config, config.n_embd
        self.patch = Linear(c.channels * c.patch_size**2, d, "patch", c.bias)
        self.cls = Embedding(1, d, "pos") if c.pool == "cls" else None
        self.wpe = Embedding(c.block_size, d, "pos")
        self.add_blocks()
        self.head = Linear(d, c.n_class, "head", c.bias, init_scale=0.0 if c.fixup else 1.0)
        self.init_weights(seed)

    def forward(self, images, targets=None, others=None, share=None):
        """images (B, channels, S, S), normalised → logits (B, n_class), fp32.

        targets (B,), −1 = ignored → loss: cross-entropy in nats, mean over the images that count, 0
        if none does. With mixup or cutmix: targets with weight `share` (B,), `others` (B,) with the
        rest."""
        x = self.stream(images)
        if targets is None:
            return self.logits(x), None
        return None if self.training else self.logits(x), self.loss(x, targets, others, share)

    def stream(self, images):
        """The residual stream after the last block, before the final norm: (B, channels, S, S) →
        (B, T, C)."""
        return self.through_blocks(self.embed(images))

    def embed(self, images):
        """The stream before the first block."""
        x = upcast(self.patch(patches(images, self.config.patch_size)))
        if self.cls is not None:
            x = torch.cat((self.cls.weight.expand(len(x), 1, -1), x), 1)
        return self.enter(x + self.wpe.weight)

    def logits(self, x):
        """x (B, T, C), the stream after the last block → (B, n_class), fp32."""
        x = self.final_norm(x)
        return upcast(self.head(x.mean(1) if self.cls is None else x[:, 0]))

    def loss(self, x, targets, others=None, share=None):
        """Mean cross-entropy in nats for `logits(x)`; targets, others and share as in `forward`."""
        logits = self.logits(x)
        smoothing = self.runtime.label_smoothing if self.training else 0.0
        how = dict(ignore_index=-1, reduction="none", label_smoothing=smoothing)
        losses = F.cross_entropy(logits, targets, **how)
        if others is not None:
            losses = share * losses + (1 - share) * F.cross_entropy(logits, others, **how)
        return losses.sum() / (targets != -1).sum().clamp(min=1)

    @staticmethod
    def inputs(images, targets, *mixed) -> tuple:
        """What `stream` takes of a batch."""
        return (images,)

    def example(self, rows: int) -> tuple:
        """A batch of zeros on the model's device: images (rows, channels, S, S) and targets
        (rows,)."""
        c, device = self.config, self.wpe.weight.device
        images = torch.zeros(rows, c.channels, c.image_size, c.image_size, device=device)
        return images, torch.zeros(rows, dtype=torch.long, device=device)

    def flops_per_token(self) -> int:
        """Training FLOPs of an image, as `GPT.flops_per_token` counts them, divided by its
        tokens."""
        c = self.config
        ends = (
            self.patch.weight.numel() * (c.image_size // c.patch_size) ** 2
            + self.head.weight.numel()
        )
        return 6 * (self.active_matrices() + ends // c.block_size) + self.attention_flops()


def patches(images, size: int):
    """(B, channels, S, S) → (B, N, channels · size²): square patches, row by row; in each the order
    of a convolution's weight (channel, y, x)."""
    B, channels, S, _ = images.shape
    x = images.reshape(B, channels, S // size, size, S // size, size).permute(0, 2, 4, 1, 3, 5)
    return x.reshape(B, (S // size) ** 2, channels * size * size)
