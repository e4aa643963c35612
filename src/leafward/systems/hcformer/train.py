"""`leafward train hcformer`: `leafward train vision` with HCFormer."""

from __future__ import annotations

from leafward.systems.hcformer import config as settings
from leafward.systems.vision import train as vision


class Training(vision.Training):
    recipe, settings = "hcformer", settings


run = Training.launch
