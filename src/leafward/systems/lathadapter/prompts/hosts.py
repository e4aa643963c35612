"""The hosts: which prompts, which losses. Each takes a prompted encoder, for tokens or for cached features."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from leafward.errors import UsageError
from leafward.geometry.scalars import wide
from leafward.systems.lathadapter.prompts.features import Bottleneck, Plain
from leafward.systems.lathadapter.prompts.host import Host, Output, cosine


class ZeroShot(Host):
    """CLIP as it is: nothing to train."""

    def __init__(self, classes: Tensor, scale: float = 100.0) -> None:
        super().__init__(Plain(), classes, scale)


class Coop(Host):
    """CoOp (Zhou et al. 2022): learned context for the classes, cross-entropy."""


class MaPLe(Host):
    """MaPLe (Khattak et al. 2023): deep prompts in both encoders, those of the images coupled to those of the texts.

    The coupling is the encoder's (`sides="coupled"`); the loss is the cross-entropy.
    """


class PromptSRC(Host):
    """PromptSRC (Khattak et al. 2023): independent prompts that are held to the frozen features and logits.

    Loss: cross-entropy + 25 mean|t − t₀| + 10 mean|z − z₀| + KL of the logits (unit features; index 0: frozen). t₀ are
    means of the frozen features of a class over many templates (`diverse`, (C, d)), in the text drift and in the
    frozen logits; without them those of the one template. The weights are averaged over the training with a
    Gaussian window, here over all that is trained, attributes included.
    """

    def __init__(
        self,
        encoder: nn.Module,
        classes: Tensor,
        scale: float = 100.0,
        *,
        text_weight: float = 25.0,
        image_weight: float = 10.0,
        window: tuple[float, float] = (0.75, 0.05),
        diverse: Tensor | None = None,
    ) -> None:
        """`window`: centre and width of the Gaussian, as shares of the training (the authors': epochs 15 ± 1 of 20)."""
        super().__init__(encoder, classes, scale)
        self.text_weight, self.image_weight, self.window = text_weight, image_weight, window
        self.average: GaussianAverage | None = None
        if diverse is not None and len(diverse) != len(classes):
            raise UsageError(f"diverse must have a row for each of the {len(classes)} classes, got {len(diverse)}")
        self.register_buffer("diverse", diverse, persistent=False)

    def _frozen_text(self, classes: Tensor) -> Tensor:
        """t₀: averaged over templates for the classes of the training."""
        known = self.diverse is not None and classes is self.classes
        return wide(self.diverse if known else self.prompted.frozen_text(classes))  # pyright: ignore[reportArgumentType]

    def losses(self, output: Output, images: Tensor, classes: Tensor, teacher: Tensor | None) -> dict[str, Tensor]:
        losses = super().losses(output, images, classes, teacher)
        if not losses:
            return losses
        if self.average is not None and self.training:
            self.average.update(self)
        with torch.no_grad():
            image, text = wide(self.prompted.frozen_image(images)), self._frozen_text(classes)
            logits = self.scale * cosine(image, text)
        losses["text_drift"] = self.text_weight * _unit_gap(output.text, text)
        losses["image_drift"] = self.image_weight * _unit_gap(output.image, image)
        losses["logit_drift"] = _divergence(output.logits, logits)
        return losses

    def prepare(self, steps: int) -> None:
        self.average = GaussianAverage(self, steps, *self.window)

    def finish(self) -> None:
        if self.average is not None:
            self.average.copy_to(self)
            self.average = None


class PromptKD(Host):
    """PromptKD (Li et al. 2024): a student's image features, projected into the space of a teacher, learn its logits.

    The classifier is the teacher's: `classes` are its class features (C, d′) with its prompts. Loss: 1000 · KL per
    entry of the logits; labels are not used. Where the teacher's features are fewer than the images, those behind them
    are not distilled: images with labels, for a latent hierarchy on top.
    """

    def __init__(
        self, encoder: nn.Module, classes: Tensor, width: int, scale: float = 100.0, *, weight: float = 1000.0
    ) -> None:
        super().__init__(encoder, classes, scale)
        self.weight = weight
        self.projector = Projector(width, classes.shape[1])

    def image(self, images: Tensor) -> Tensor:
        return self.projector(self.prompted.image(images))

    def text(self, classes: Tensor) -> Tensor:
        return classes

    def class_features(self) -> Tensor:
        return self.classes

    def losses(self, output: Output, images: Tensor, classes: Tensor, teacher: Tensor | None) -> dict[str, Tensor]:
        if teacher is None:
            return {}
        logits = output.logits[: len(teacher)]
        return {"distillation": self.weight * _divergence(logits, self.scale * cosine(teacher, classes))}


class Projector(nn.Module):
    """Two layers from a student's space to a teacher's, beginning at the identity where the widths agree."""

    def __init__(self, width: int, target: int) -> None:
        super().__init__()
        self.skip = nn.Linear(width, target, bias=False)
        self.inner = nn.Sequential(nn.Linear(width, target), nn.ReLU(), nn.Linear(target, target))
        nn.init.eye_(self.skip.weight)
        last = self.inner[2]
        assert isinstance(last, nn.Linear)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)

    def forward(self, x: Tensor) -> Tensor:
        unit = F.normalize(x, dim=-1)
        return self.skip(unit) + self.inner(unit)


class ClipAdapter(Host):
    """CLIP-Adapter on cached features, cross-entropy."""

    def __init__(self, classes: Tensor, scale: float = 100.0) -> None:
        super().__init__(Bottleneck(classes.shape[1]), classes, scale)


class TipAdapter(Host):
    """Tip-Adapter (Zhang et al. 2022), without training: the shots are a cache of keys with their labels.

    logits + α Σᵢ exp(−β (1 − z·kᵢ)) onehot(yᵢ). Other classes than those of the training keep their zero-shot logits;
    `remembered` gives the second term for classes that are met again in another data set.
    """

    def __init__(self, classes: Tensor, scale: float = 100.0, *, alpha: float = 1.0, beta: float = 5.5) -> None:
        super().__init__(Plain(), classes, scale)
        self.alpha, self.beta = alpha, beta
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def remember(self, images: Tensor, labels: Tensor) -> None:
        """Fill the cache: features (K, d) and labels (K)."""
        if len(images) != len(labels):
            raise UsageError(f"images and labels must be equally many, got {len(images)} and {len(labels)}")
        self.keys = F.normalize(wide(images), dim=-1)
        self.values = F.one_hot(labels, len(self.classes)).to(self.keys.dtype)

    def forward(
        self,
        images: Tensor,
        labels: Tensor | None = None,
        classes: Tensor | None = None,
        teacher: Tensor | None = None,
    ) -> Output:
        output = super().forward(images, labels, classes, teacher)
        if self.keys is None or self.values is None or classes is not None:
            return output
        return Output(output.image, output.text, output.logits + self.remembered(images), labels)

    def remembered(self, images: Tensor) -> Tensor:
        """What the cache says of features (B, d) for the classes of the training: (B, C)."""
        assert self.keys is not None
        assert self.values is not None
        return self.alpha * torch.exp(-self.beta * (1.0 - cosine(images, self.keys))) @ self.values


class GaussianAverage(nn.Module):
    """Σ wₜ pₜ / Σ wₜ over the steps of a training, wₜ a Gaussian of the time. Its sums are part of the state, so that a
    run can be resumed."""

    step: Tensor
    total: Tensor

    def __init__(self, model: nn.Module, steps: int, centre: float, width: float) -> None:
        super().__init__()
        self.centre, self.width = centre * steps, max(width * steps, 1.0)
        self.names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        for index, name in enumerate(self.names):
            self.register_buffer(f"p{index}", model.get_parameter(name).detach().clone())
        device = model.get_parameter(self.names[0]).device if self.names else None
        self.register_buffer("step", torch.zeros((), dtype=torch.float64, device=device))
        self.register_buffer("total", torch.zeros((), dtype=torch.float64, device=device))

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        weight = torch.exp(-0.5 * ((self.step - self.centre) / self.width) ** 2)
        self.total += weight
        share = weight / self.total.clamp_min(torch.finfo(torch.float64).tiny)
        for index, name in enumerate(self.names):
            average = self.get_buffer(f"p{index}")
            average.lerp_(model.get_parameter(name).detach(), share.to(average.dtype))
        self.step += 1

    @torch.no_grad()
    def copy_to(self, model: nn.Module) -> None:
        for index, name in enumerate(self.names):
            model.get_parameter(name).copy_(self.get_buffer(f"p{index}"))


def _unit_gap(x: Tensor, y: Tensor) -> Tensor:
    """Mean absolute difference of unit features."""
    return (F.normalize(wide(x), dim=-1) - F.normalize(y, dim=-1)).abs().mean()


def _divergence(logits: Tensor, target: Tensor) -> Tensor:
    """KL(target ‖ logits) per entry, as the authors of PromptSRC and PromptKD divide it."""
    ours, theirs = F.log_softmax(logits, dim=-1), F.log_softmax(target, dim=-1)
    return F.kl_div(ours, theirs, reduction="sum", log_target=True) / logits.numel()
