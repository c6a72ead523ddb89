"""A ViT on the blocks of model.py: patches take the place of tokens, and each sees each other.

    images (B, channels, S, S)
        → patches (B, N, channels · P²) → W patch + b, after a class token (pool=cls)
        → + positions → the blocks of model.py, with the same flags → final norm
        → class token, or mean over the patches → head: logits (B, n_class)

It is the ViT of Dosovitskiy et al. (2021), and V-DNT (DNT, arXiv 2507.17501) with the flags of
config/vdnt/: a ViT, built on timm's (App. C), with four types of norm (sec. 3.3). Class token or
mean: not published. That the final norm acts on every token, before the mean, is our choice.
`python model.py config/vdnt/large.py` prints the network.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from layers.linear import Embedding, Linear
from layers.ops import upcast
from model import GPTConfig, Transformer


class ViT(Transformer):
    """`model(images, targets, …)` → (None, loss) in training, (logits, loss) in evaluation mode;
    `model(images)` → (logits, None)."""

    def __init__(self, config: GPTConfig, seed: int = 1337):
        super().__init__(config)
        patch_numel = config.channels * config.patch_size**2
        self.patch = Linear(patch_numel, config.n_embd, "patch", config.bias)
        self.cls = None
        if config.pool == "cls":
            self.cls = Embedding(1, config.n_embd, "pos")
        self.wpe = Embedding(config.block_size, config.n_embd, "pos")
        self.add_blocks()
        self.head = Linear(config.n_embd, config.n_class, "head", config.bias)
        self.share_runtime()
        self.init_weights(seed)

    def forward(
        self,
        images: Tensor,
        targets: Tensor | None = None,
        others: Tensor | None = None,
        share: Tensor | None = None,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Normalised images (B, channels, S, S) → logits (B, n_class), fp32.

        With targets (B,), −1 = ignored → loss: cross-entropy in nats, mean over the images that
        count, 0 if none does. With mixup or cutmix, `targets` have the weight `share` (B,), and
        `others` (B,) the weight 1 − share.
        """
        x = self.stream(images)
        if targets is None:
            return self.logits(x), None
        logits = None
        if not self.training:
            logits = self.logits(x)
        return logits, self.loss(x, targets, others, share)

    def stream(self, images: Tensor) -> Tensor:
        """Images (B, channels, S, S) → the residual stream (B, T, C) before the final norm."""
        return self.through_blocks(self.embed(images))

    def embed(self, images: Tensor) -> Tensor:
        """The residual stream (B, T, C) before the first block."""
        x = upcast(self.patch(patches(images, self.config.patch_size)))
        if self.cls is not None:
            x = torch.cat((self.cls.weight.expand(len(x), 1, -1), x), 1)
        return self.enter(x + self.wpe.weight)

    def logits(self, x: Tensor) -> Tensor:
        """The residual stream x (B, T, C) before the final norm → (B, n_class), fp32."""
        x = self.final_norm(x)
        pooled = x.mean(1) if self.cls is None else x[:, 0]
        return upcast(self.head(pooled))

    def loss(
        self,
        x: Tensor,
        targets: Tensor,
        others: Tensor | None = None,
        share: Tensor | None = None,
    ) -> Tensor:
        """Mean cross-entropy in nats for `logits(x)`; targets, others and share as in `forward`."""
        logits = self.logits(x)
        losses = self.cross_entropy(logits, targets)
        if others is not None:
            losses = share * losses + (1 - share) * self.cross_entropy(logits, others)
        return losses.sum() / (targets != -1).sum().clamp(min=1)

    def cross_entropy(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The cross-entropy of each image (B,), 0 where its target is −1."""
        smoothing = self.runtime.label_smoothing if self.training else 0.0
        return F.cross_entropy(
            logits, targets, ignore_index=-1, reduction="none", label_smoothing=smoothing
        )

    @staticmethod
    def inputs(images: Tensor, targets: Tensor, *mixed: Tensor) -> tuple[Tensor, ...]:
        return (images,)

    def example(self, rows: int) -> tuple[Tensor, Tensor]:
        """A batch of zeros: images (rows, channels, S, S) and targets (rows,)."""
        size = self.config.image_size
        device = self.wpe.weight.device
        images = torch.zeros(rows, self.config.channels, size, size, device=device)
        targets = torch.zeros(rows, dtype=torch.long, device=device)
        return images, targets

    def flops_per_token(self) -> int:
        """Training FLOPs of an image, as `GPT.flops_per_token` counts them, divided by its number
        of tokens."""
        config = self.config
        n_patches = (config.image_size // config.patch_size) ** 2
        ends = self.patch.weight.numel() * n_patches + self.head.weight.numel()
        matrices = self.active_matrices() + ends // config.block_size
        return 6 * matrices + self.attention_flops()


def patches(images: Tensor, size: int) -> Tensor:
    """Images (B, channels, S, S) → square patches (B, N, channels · size²), row by row; each is
    flattened in the order of a convolution's weight (channel, y, x)."""
    B, channels, S, _ = images.shape
    n = S // size
    x = images.reshape(B, channels, n, size, n, size).permute(0, 2, 4, 1, 3, 5)
    return x.reshape(B, n**2, channels * size * size)
