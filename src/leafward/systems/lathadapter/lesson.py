"""What a host learns from, batch by batch: shots with their labels, or all images with a teacher's features."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from leafward.engine import Loss
from leafward.systems.lathadapter.images import Pixels
from leafward.systems.lathadapter.prompts import Host

Images = Tensor | Pixels


@dataclass(frozen=True)
class Labelled:
    """Rows of a data set (n), and their labels (n) where they are known."""

    rows: Tensor
    labels: Tensor | None


@dataclass(frozen=True)
class Teaching:
    """A frozen teacher and what it reads: the same images, as its features or its pixels."""

    host: Host
    images: Images


class Lesson:
    """A batch is a tensor of places among the rows.

    `beside`: shots that go with each batch, one for each of its images, behind them; they alone have labels then.
    Pixels are cropped and turned over at random, the teacher's in the same way as the student's.
    """

    # Some parameters of a host may rest: the text context of PromptKD's student.
    unused_parameters = True

    mode = "max"

    def __init__(
        self,
        images: Images,
        main: Labelled,
        *,
        device: torch.device,
        teaching: Teaching | None = None,
        beside: Labelled | None = None,
        crops: bool = False,
        watch: Callable[[], dict[str, float]] | None = None,
        keep_best: bool = False,
    ) -> None:
        self.device, self.main, self.beside, self.crops = device, _moved(main, device), None, crops
        self.images, self.teaching = images, teaching
        if isinstance(images, Tensor):  # the rows that are used, once, where they are computed with
            self.images = images[main.rows].to(device)
        if beside is not None:
            self.beside = _moved(beside, device)
            self.shots = images[beside.rows].to(device) if isinstance(images, Tensor) else None
        if teaching is not None:
            teaching.host.eval()
        if teaching is not None and isinstance(teaching.images, Tensor):
            self.teaching = Teaching(teaching.host, teaching.images[main.rows].to(device))
        self.monitor = "accuracy" if keep_best else None
        if watch is not None:
            self.evaluate = lambda model: watch()

    @property
    def dataset(self) -> range:
        return range(len(self.main.rows))

    def collate(self, places: list[int]) -> Tensor:
        return torch.tensor(places)

    def loss(self, model: nn.Module, batch: Tensor) -> Loss:
        images, above = self._seen(batch)
        labels = None if self.main.labels is None else self.main.labels[batch]
        if self.beside is not None:
            labels = torch.cat([labels_of(labels, batch), self._beside_labels(batch)])
        teaching = None
        if self.teaching is not None:
            with torch.no_grad():
                teaching = self.teaching.host.image(above)
        output = model(images, labels, teacher=teaching)
        count = len(batch)
        parts = {name: count * value.detach() for name, value in output.losses.items()}
        return Loss(count * output.loss, count, parts)

    def _beside_labels(self, batch: Tensor) -> Tensor:
        assert self.beside is not None
        assert self.beside.labels is not None
        return self.beside.labels[batch % len(self.beside.rows)]

    def _seen(self, batch: Tensor) -> tuple[Any, Any]:
        """The images of a batch with the shots beside them, and what the teacher sees of the former."""
        above = self.teaching.images if self.teaching is not None else None
        if isinstance(self.images, Tensor):
            images = self.images[batch]
            if self.beside is not None:
                assert self.shots is not None
                images = torch.cat([images, self.shots[batch % len(self.shots)]])
            return images, above[batch] if isinstance(above, Tensor) else None
        places = batch.cpu()
        rows = self.main.rows[places]
        size = max(self.images.size, above.size) if isinstance(above, Pixels) else self.images.size
        views = self._opened(self.images, rows, size)
        taught = above.encoder.prepare_images(views).to(self.device) if isinstance(above, Pixels) else None
        if self.beside is not None:
            shots = self.beside.rows[places % len(self.beside.rows)]
            views = [*views, *self._opened(self.images, shots, size)]
        return self.images.encoder.prepare_images(views).to(self.device), taught

    def _opened(self, images: Pixels, rows: Tensor, size: int) -> list[Any]:
        return images.views(rows, size) if self.crops else images.opened(rows)


def labels_of(labels: Tensor | None, batch: Tensor) -> Tensor:
    """The labels of a batch, −1 where there are none."""
    return torch.full_like(batch, -1) if labels is None else labels


def _moved(given: Labelled, device: torch.device) -> Labelled:
    return Labelled(given.rows, None if given.labels is None else given.labels.to(device))
