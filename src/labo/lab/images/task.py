"""Image classification: digits, (Fashion-)MNIST, CIFAR, and folders of images such as ImageNet."""

from __future__ import annotations

import base64
import io
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import torch
from accelerate import Accelerator
from PIL import Image
from pydantic import Field, field_validator, model_validator
from torch import Tensor, nn

from ..._names import unknown_name
from .. import config
from ..custom import call_function, function_version, in_a_line, is_reference
from ..errors import RequestError
from ..methods import METHODS
from ..pretrained import (
    Lora,
    adapter_files,
    add_lora,
    check_finite,
    check_sizes,
    folder_digest,
    freeze,
)
from ..run import files as atomic
from ..run.distributed import free_memory, gather_rows, in_step, on_cpu
from ..run.progress import notice, track
from ..run.seeds import mix, permutation, uniforms
from ..schedule import ahead
from ..tasks import Batch, Evaluation, Task
from . import augment
from .finetuning import FolderClassifier, head_note, load_classifier, normalization
from .image_files import FolderImages
from .networks import CONVNETS
from .randaugment import LARGEST, rand_augment
from .scores import classification_scores
from .sources import BUILT_IN, HASHED_BYTES, ON_DISK, load_images
from .splits import ImageSplit
from .vit import TRANSFORMERS, Pooling, VisionTransformer, plain_config
from .windows import (
    RESIZED_CROP_DRAWS,
    Chooser,
    View,
    center_window,
    random_window,
    resized,
    stacked,
)

_EVALUATED_AT_ONCE = 256
_READ_AT_ONCE = 16  # images that a thread reads in a row
_EXPLORED = 6  # examples with all their logits
_LARGEST_AUTO = 224  # pixels of data.size=auto
_FEW_IMAGES = 100
_LISTED_CLASSES = 256  # probabilities of more classes are packed in a record
_SIZES_ONLY = (
    f"the images have more than {HASHED_BYTES >> 30} GiB: the fingerprint of the data covers the "
    "names and sizes of the files, not their content"
)


class ImageData(config.Section):
    """The images, and how they are augmented in training."""

    name: str = Field(
        description="The data set: "
        + ", ".join(f"`{name}`" for name in [*BUILT_IN, *ON_DISK])
        + ", or `package.module:function` for your own. `digits` comes with the package; the "
        "others need `root`."
    )
    arguments: dict[str, Any] = Field(
        {}, description="Keyword arguments of a function of your own."
    )
    root: str | None = Field(None, description="The folder that holds the data set.")
    holdout: Annotated[float, Field(gt=0, lt=1)] | Literal["auto"] = Field(
        0.1,
        description="Share of the training images held out for validation; `auto` is about 200 "
        "images, at least a tenth and at most a quarter of them.",
    )
    holdout_seed: int = Field(0, ge=0, description="The seed of the hold-out split.")
    train_size: int | None = Field(
        None, ge=1, description="Train on this many images, drawn at random; null is all of them."
    )
    padding: int = Field(
        0,
        ge=0,
        description="Pixels of padding before a random crop to the original size; 0 is off. "
        "Images of a folder get a random resized crop instead.",
    )
    padding_mode: Literal["zeros", "reflect"] = Field(
        "zeros", description="What is padded: zeros, or the mirrored image."
    )
    flip: bool | Literal["alternate"] = Field(
        False,
        description="Mirror images, left to right: a random half in each epoch, or with "
        "`alternate` a random half in the first epoch, the other half in the second, and so on.",
    )
    rotation: float = Field(
        0.0, ge=0, le=180, description="Rotate each image by up to this angle, in degrees."
    )
    size: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        224,
        description="Width and height to which images of a folder are cropped; `auto` follows the "
        "files: the median of their shorter sides, in multiples of 32, at most 224.",
    )
    randaugment: int = Field(
        0, ge=0, description="RandAugment: random operations on each image; 0 is off."
    )
    magnitude: float = Field(
        9.0, ge=0, le=LARGEST, description="RandAugment: the strength of the operations, 0 to 30."
    )
    erasing: float = Field(
        0.0,
        ge=0,
        le=1,
        description="Random erasing: the probability that a random box of an image is set to the "
        "mean color.",
    )
    mixup: float = Field(0.0, ge=0, description="The parameter a of mixup's Beta(a, a); 0 is off.")
    cutmix: float = Field(
        0.0,
        ge=0,
        description="The parameter a of CutMix's Beta(a, a); 0 is off. With both on, each "
        "micro-batch uses one of them at random.",
    )
    mix_probability: float = Field(
        1.0, gt=0, le=1, description="Probability that a micro-batch is mixed at all."
    )

    @field_validator("name")
    @classmethod
    def _known(cls, name: str) -> str:
        if not is_reference(name) and name not in BUILT_IN and name not in ON_DISK:
            raise ValueError(unknown_name("data set", name, [*BUILT_IN, *ON_DISK]))
        return name

    @field_validator("flip", mode="before")
    @classmethod
    def _mirrored(cls, flip: object) -> object:
        if not isinstance(flip, bool) and flip != "alternate":
            raise ValueError(f"true, false or alternate, not {flip!r}")
        return flip

    @model_validator(mode="after")
    def _consistent(self) -> ImageData:
        if self.arguments and not is_reference(self.name):
            raise ValueError("arguments: only a function of your own has them")
        return self

    def unused(self) -> dict[str, str]:
        reasons = {}
        if self.padding == 0:
            reasons["padding_mode"] = "padding=0"
        if self.name == "folder":
            reasons |= dict.fromkeys(("padding", "padding_mode"), "name=folder")
        elif not is_reference(self.name):
            reasons["size"] = f"name={self.name}"
        if self.randaugment == 0:
            reasons["magnitude"] = "randaugment=0"
        if self.mixup == self.cutmix == 0:
            reasons["mix_probability"] = "mixup=0 and data.cutmix=0"
        return reasons


class ImageModel(config.Section):
    """Which network, or a pre-trained folder. The keys from patch on are of vision transformers."""

    name: str | None = Field(
        None,
        description="The network: "
        + ", ".join(f"`{name}`" for name in [*CONVNETS, *TRANSFORMERS])
        + ", or `package.module:function` for your own.",
    )
    arguments: dict[str, Any] = Field(
        {}, description="Keyword arguments of a function of your own."
    )
    pretrained: str | None = Field(
        None,
        description="A Hugging Face folder with an image classifier to start from. Only "
        "safetensors are read.",
    )
    freeze: config.Names = Field(
        (),
        description="Modules or parameters that are not trained, such as `vit.embeddings`; `*` "
        "matches anything.",
    )
    lora: Lora | None = Field(
        None,
        description="With `pretrained`: train low-rank adapters and the output layer only.",
    )
    patch: int | None = Field(
        None, ge=1, description="Vision transformers: width of a patch in pixels."
    )
    image_size: int | None = Field(
        None,
        ge=1,
        description="Vision transformers: width of the images in pixels; others are resized. By "
        "default that of the data.",
    )
    width: int | None = Field(None, ge=1, description="Vision transformers: hidden size.")
    layers: int | None = Field(None, ge=1, description="Vision transformers: number of layers.")
    heads: int | None = Field(None, ge=1, description="Vision transformers: attention heads.")
    ffn: int | None = Field(
        None, ge=1, description="Vision transformers: inner size of the feed-forward layers."
    )
    dropout: float | None = Field(None, ge=0, lt=1, description="Vision transformers: dropout.")
    drop_path: float | None = Field(
        None,
        ge=0,
        lt=1,
        description="Vision transformers: stochastic depth, the probability to skip the last "
        "layer. It grows linearly from 0 at the first layer.",
    )
    pooling: Pooling | None = Field(
        None,
        description="Vision transformers: what the classifier sees: the state of the class token, "
        "the mean over the patches, or an average with learned weights (`sequence`).",
    )

    @field_validator("name")
    @classmethod
    def _known(cls, name: str | None) -> str | None:
        known = [*CONVNETS, *TRANSFORMERS]
        if name is not None and not is_reference(name) and name not in known:
            raise ValueError(unknown_name("model", name, known))
        return name

    @model_validator(mode="after")
    def _consistent(self) -> ImageModel:
        if (self.name is None) == (self.pretrained is None):
            raise ValueError("give name or pretrained, and not both (name=null leaves it out)")
        if self.arguments and not self.is_custom:
            raise ValueError("arguments: only a function of your own has them")
        if self.lora is not None and self.pretrained is None:
            raise ValueError("lora: adapters are for a pretrained model")
        if self.options() and self.name not in TRANSFORMERS:
            keys = ", ".join(self.options())
            raise ValueError(
                f"{keys}: only vision transformers have it, {self.name or 'pretrained'} has not"
            )
        return self

    @property
    def is_custom(self) -> bool:
        """Whether the name is that of a function of your own."""
        return self.name is not None and is_reference(self.name)

    def options(self) -> dict[str, Any]:
        """What differs from the defaults of a vision transformer."""
        start = {"name", "arguments", "pretrained", "freeze", "lora"}
        return self.model_dump(exclude=start, exclude_none=True)


class ImageTrain(config.Train):
    """The training loop of image classification."""

    batch_size: int = Field(
        ge=1, description="Images per optimizer step, over all processes and micro-batches."
    )
    select: Literal["accuracy", "nll"] = Field(
        "accuracy", description="The score on the validation split that selects the model."
    )


class ImageRecipe(config.Recipe):
    """A recipe for image classification."""

    data: ImageData
    model: ImageModel
    train: ImageTrain

    @model_validator(mode="after")
    def _consistent(self) -> ImageRecipe:
        mixed = self.data.mixup or self.data.cutmix
        if mixed and self.method and not METHODS[self.method["name"]].mixes:
            raise ValueError(
                f"method {self.method['name']} does not support data.mixup and data.cutmix"
            )
        return self


@dataclass(frozen=True)
class Pixels:
    """Images as bytes, and what is left to do with them on the device that computes.

    Bytes take a quarter of the memory of normalized images on their way to the device.
    """

    images: Tensor  # (N, C, H, W) uint8
    # from these images, on the device, to what the model is given
    finish: Callable[[Tensor], Tensor]

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Tensor:
        return self.finish(self.images.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Pixels:
        return replace(self, images=self.images.pin_memory())


class ImageTask(Task):
    """Image classification: data, network and scores."""

    Recipe = ImageRecipe
    higher_is_better: ClassVar = {"accuracy": True, "nll": False}
    provides: ClassVar = frozenset({"one_target_per_sample", "peers", "class_table"})
    shardable: ClassVar = True
    method_defaults: ClassVar = {
        # The smallest tau of the paper's grid {5, 10, 20, 40}. With the batch mean of the KL the
        # size of its gradient hardly depends on it.
        "kd": {"alpha": 0.9, "tau": 5.0},
        # The authors' scale is kl_reduction=elementwise with a multiplier per model.
        "tf-kd-self": {"alpha": 0.95, "tau": 20.0},
    }

    def __init__(self, recipe: ImageRecipe) -> None:
        self.recipe = recipe
        options = recipe.data
        self.data = load_images(
            options.name,
            options.root,
            holdout=options.holdout,
            holdout_seed=options.holdout_seed,
            train_size=options.train_size,
            arguments=options.arguments,
        )
        if not len(self.data.valid):
            raise RequestError(
                f"data.holdout: {options.holdout} of {len(self.data.train)} images leaves no "
                "validation images"
            )
        self._view, self.notes = self._model_view()
        smallest = min(self._view.height, self._view.width)
        if options.padding_mode == "reflect" and options.padding >= smallest:
            raise RequestError(
                f"data.padding: {options.padding} pixels cannot be reflected in images of "
                f"{smallest}; give fewer, or data.padding_mode=zeros"
            )
        self.fingerprint = f"{options.name}@{self.data.fingerprint[:12]}"
        self.mean, self.std = self.data.mean, self.data.std
        self.notes += self._small_splits()
        if not self.data.covers_content:
            self.notes.append(_SIZES_ONLY)
        if (folder := recipe.model.pretrained) is not None:
            self.fingerprint += f"~{folder_digest(folder)}"
            self.notes += head_note(folder, self.data.classes)
            if (wanted := normalization(folder, len(self.mean))) is not None:
                self.mean, self.std = wanted
        if recipe.model.is_custom:
            self.fingerprint += f"~{recipe.model.name}@{self._model_version}"
        self.labels = self.data.train.labels
        self.size, self.num_classes = len(self.labels), len(self.data.classes)
        self.steps_per_epoch = -(-self.size // recipe.train.batch_size)
        self._order = lru_cache(maxsize=2)(partial(permutation, recipe.seed, size=self.size))
        workers = recipe.train.workers
        self._map: Callable[..., Iterator[Tensor]] = (
            ThreadPoolExecutor(workers).map if workers else map
        )
        # The samples sorted by class, and where each class starts; peers() uses them.
        self._by_class = self.labels.argsort(stable=True)
        self._class_sizes = self.labels.bincount(minlength=self.num_classes)
        self._class_starts = self._class_sizes.cumsum(0) - self._class_sizes

    # ------------------------------------------------------------------ the model

    def build_model(self) -> nn.Module:
        model = self._new_model()
        if on_cpu() and isinstance(self.data.train.images, FolderImages):
            self._check_memory(model)
        return model

    def _check_memory(self, model: nn.Module) -> None:
        """Refuse a batch whose activations do not fit into memory, before the machine swaps."""
        train = self.recipe.train
        # At once, on this machine.
        images = -(-min(train.batch_size, self.size) // train.accumulate)
        needed = images * _activation_bytes(model, len(self.mean), self._view)
        free = free_memory()
        if needed > free:
            parts = train.accumulate * math.ceil(needed / free)
            raise RequestError(
                f"train.batch_size: a batch of {images} images of {self._view.height} pixels needs "
                f"about {needed / 2**30:.0f} GiB for its activations, and "
                f"{free / 2**30:.0f} GiB are free; a smaller data.size or train.accumulate={parts} "
                "needs less"
            )

    def _new_model(self) -> nn.Module:
        options = self.recipe.model
        if options.pretrained is None:
            model = _fresh_model(self.facts())
            if options.is_custom:
                self._check_outputs(model)
            if options.freeze:
                freeze(model, options.freeze)
            return model
        classifier = load_classifier(options.pretrained, self.num_classes)
        if len(self.mean) not in (1, classifier.channels):
            raise RequestError(
                f"{options.pretrained} takes images of {classifier.channels} channels, the data "
                f"has {len(self.mean)}"
            )
        if options.freeze:
            freeze(classifier.network, options.freeze)
        if options.lora is not None:
            add_lora(classifier.network, options.lora, classifier.heads, train_heads=True)
        return classifier

    @property
    def _model_version(self) -> str:
        """Of the function of the user that builds the model."""
        assert self.recipe.model.name is not None
        return function_version("model.name", self.recipe.model.name)

    def _check_outputs(self, model: nn.Module) -> None:
        """Try a model of the user on two images, before the training."""
        name = self.recipe.model.name
        images = self._plain_views(self.data.train, torch.arange(min(2, self.size))).to("cpu")
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            try:
                logits = model.eval()(images)
            except Exception as error:  # the model is not ours
                shape = tuple(images.shape)
                raise RequestError(
                    f"model.name: {name} fails on images of shape {shape}: {in_a_line(error)}"
                ) from error
        model.train()
        wanted, returned = (len(images), self.num_classes), f"a {type(logits).__name__}"
        if isinstance(logits, Tensor):
            if tuple(logits.shape) == wanted and logits.is_floating_point():
                return
            returned = f"{logits.dtype} of shape {tuple(logits.shape)}"
        raise RequestError(
            f"model.name: {name} must return logits of shape {wanted} for {len(images)} images, "
            f"but returns {returned}"
        )

    @staticmethod
    def load_model(folder: Path) -> nn.Module:
        path, where = folder / "config.json", f"{folder / 'config.json'}: model"
        config = json.loads(path.read_text(encoding="utf-8"))
        facts = config.get("labo", config)
        if facts["model"] is None:  # it was pre-trained
            return load_classifier(folder)
        if is_reference(facts["model"]):
            version = function_version(where, facts["model"])
            if version != facts["version"]:
                notice(
                    f"{facts['model']} has changed since {folder} was trained: it was "
                    f"{facts['version']}, it is {version}"
                )
        check_sizes(path, facts, [folder / "model.safetensors"])
        model = _fresh_model(facts, where)
        model.load_state_dict(atomic.read_tensors(folder / "model.safetensors"))
        check_finite(model, folder)
        return model

    def facts(self) -> dict[str, Any]:
        model = self.recipe.model
        options = dict(model.arguments) if model.is_custom else model.options()
        if model.name in TRANSFORMERS:
            options.setdefault("image_size", self._view.width)
        return {
            "task": self.recipe.task,
            "model": model.name,
            **({"options": options} if options else {}),
            **({"version": self._model_version} if model.is_custom else {}),
            "num_classes": self.num_classes,
            "in_channels": len(self.data.mean),
            "classes": list(self.data.classes),
            "mean": list(self.mean),
            "std": list(self.std),
            "input": asdict(self._view),
        }

    def model_files(
        self, model: nn.Module, weights: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], dict[str, str | bytes]]:
        config, adapter = self.facts(), {}
        if isinstance(model, FolderClassifier):
            options = self.recipe.model
            adapter = adapter_files(
                model.network,
                model.network_weights(weights),
                options.lora,
                options.pretrained,
                trained_heads=model.heads,
            )
            weights = model.plain_weights(weights)
            config = {**model.plain_config(config["classes"]), "labo": config}
        elif isinstance(model, VisionTransformer):
            plain = plain_config(model, config["classes"])
            config = config if plain is None else {**plain, "labo": config}
        return dict(weights), {"config.json": json.dumps(config, indent=2) + "\n", **adapter}

    def _model_view(self) -> tuple[View, list[str]]:
        """How an image of any size becomes one that the model is given, and what to say of it."""
        images, size = self.data.train.images, self.recipe.data.size
        if isinstance(images, Tensor):
            return View(int(images.shape[-2]), int(images.shape[-1])), []
        shorter = images.shorter_side()
        fitting = min(max(shorter // 32 * 32, 32), _LARGEST_AUTO)
        size = fitting if size == "auto" else size
        note = (
            f"the images have about {shorter} pixels on their shorter side and are enlarged to "
            f"{size}; data.size={fitting} is enough"
        )
        view = View(size, size, resize=size * 256 // 224)
        return view, [note] if size >= 2 * max(shorter, 32) else []

    def _small_splits(self) -> Iterator[str]:
        """A note for each split whose accuracy says little."""
        for name, title in (("valid", "validation"), ("test", "test")):
            count = len(getattr(self.data, name))
            if count < _FEW_IMAGES:
                yield (
                    f"the {title} split has {count} images: one of them is {100 / count:.1f} "
                    "points of accuracy"
                )

    # ------------------------------------------------------------------ training batches

    def global_batch(self, epoch: int, position: int) -> Tensor:
        first = position * self.recipe.train.batch_size
        return self._order(epoch)[first : first + self.recipe.train.batch_size]

    def batch(self, index: Tensor, epoch: int) -> Batch:
        views = self._views(index, epoch, index, "augment")
        mixed, target = self._mixing(index, epoch)
        if mixed is not None:
            finish = views.finish
            views = replace(views, finish=lambda images: mixed(finish(images)))
        return Batch(views, target, index, epoch)

    def peers(self, batch: Batch) -> Batch:
        """For each sample a random one of its class, possibly itself, with its own augmentation."""
        labels = self.labels[batch.index]
        u = uniforms(self.recipe.seed, batch.epoch, batch.index, 1, stream="peer")
        offset = (u.squeeze(-1).double() * self._class_sizes[labels]).long()
        index = self._by_class[self._class_starts[labels] + offset]
        inputs = self._views(index, batch.epoch, batch.index, "augment peer")
        return Batch(inputs, labels, index, batch.epoch)

    def _views(self, index: Tensor, epoch: int, key: Tensor, stream: str) -> Pixels:
        """Augmented training images; ``key`` selects the random numbers of each."""
        images, options, seed = self.data.train.images, self.recipe.data, self.recipe.seed
        if isinstance(images, Tensor):
            u = uniforms(seed, epoch, key, 4, stream=stream)
            views = images[index]
            if options.padding:
                reflect = options.padding_mode == "reflect"
                views = augment.random_crop(views, u[:, 2:], options.padding, reflect=reflect)
        else:
            u = uniforms(seed, epoch, key, 2 + RESIZED_CROP_DRAWS, stream=stream)
            size = self._view.height
            choosers = [partial(random_window, u=draws, size=size) for draws in u[:, 2:]]
            views = self._read(images, index, choosers)
        if options.flip == "alternate":
            first = uniforms(seed, 0, key, 1, stream=f"{stream} flip")[:, 0]
            views = augment.random_flip(views, (first + 0.5 * (epoch % 2)) % 1)
        elif options.flip:
            views = augment.random_flip(views, u[:, 0])
        if options.rotation:
            views = augment.random_rotation(views, u[:, 1], options.rotation)
        if options.randaugment:
            u = uniforms(seed, epoch, key, 2 * options.randaugment, stream=f"{stream} randaugment")
            views = rand_augment(views, u, options.magnitude)
        if not options.erasing:
            return Pixels(views, self._normalized)
        erased = uniforms(seed, epoch, key, augment.ERASING_DRAWS, stream=f"{stream} erasing")

        def finish(images: Tensor) -> Tensor:
            return augment.random_erasing(self._normalized(images), erased, options.erasing)

        return Pixels(views, finish)

    def _normalized(self, images: Tensor) -> Tensor:
        return augment.normalize(images, self.mean, self.std)

    def _read(self, images: FolderImages, index: Tensor, choosers: Sequence[Chooser]) -> Tensor:
        """Windows of image files, (N, C, H, W) uint8, by several threads if there are any.

        A thread takes many images in a row: handing them over one by one would cost more time of
        the interpreter, which only one thread at a time can have, than reading them.
        """

        def read(part: slice) -> list[Tensor]:
            jobs = zip(index[part].tolist(), choosers[part], strict=True)
            return [images.window(i, choose) for i, choose in jobs]

        parts = [
            slice(first, first + _READ_AT_ONCE) for first in range(0, len(index), _READ_AT_ONCE)
        ]
        return stacked(view for views in self._map(read, parts) for view in views)

    def _mixing(
        self, index: Tensor, epoch: int
    ) -> tuple[Callable[[Tensor], Tensor] | None, Tensor]:
        """mixup or CutMix within these samples, if the recipe asks for it, and the targets."""
        options, labels = self.recipe.data, self.labels[index]
        ways = [way for way in ("mixup", "cutmix") if getattr(options, way)]
        if not ways:
            return None, labels
        # One random draw per micro-batch, keyed by its first sample.
        seed = self.recipe.seed
        u = uniforms(seed, epoch, index[:1], 4, stream="mixing")[0].tolist()
        if u[0] >= options.mix_probability:
            return None, labels
        way = ways[int(u[1] * len(ways))]
        key = mix(epoch, int(index[0]))
        share = augment.beta_draw(seed, key, getattr(options, way))
        order = permutation(seed, key, len(index), stream="mixing")
        target = nn.functional.one_hot(labels, self.num_classes).float()
        if way == "mixup":
            mixed: Any = partial(augment.mixup, lam=share, order=order)
            return mixed, augment.mixup(target, share, order)
        box = augment.cutmix_box(self._view.height, self._view.width, share, (u[2], u[3]))
        mixed = partial(augment.cutmix, box=box, order=order)
        return mixed, augment.mixup(target, box.kept, order)

    # ------------------------------------------------------------------ scores

    @torch.no_grad()
    def evaluate(  # type: ignore[override]  # the options are those of this task
        self,
        model: nn.Module,
        split: str,
        accelerator: Accelerator,
        *,
        temperature: float | None = None,
    ) -> Evaluation:
        chosen: ImageSplit = getattr(self.data, split)
        parts = [torch.empty(0, self.num_classes, device=accelerator.device)]
        share = -(-len(chosen.labels) // accelerator.num_processes)
        with track(f"evaluating {split}", share) as advance:
            for logits, _ in self.logits(model, split, accelerator):
                parts.append(logits.log_softmax(-1))
                advance(len(logits))
        log_p = gather_rows(accelerator, torch.cat(parts)).cpu()
        scores = classification_scores(log_p, chosen.labels)
        if temperature is not None:
            after = classification_scores((log_p / temperature).log_softmax(-1), chosen.labels)
            scores |= {f"calibrated_{name}": after[name] for name in ("nll", "ece")}
        return Evaluation(scores, _records(log_p, chosen))

    @torch.no_grad()
    def logits(
        self, model: nn.Module, split: str, accelerator: Accelerator
    ) -> Iterator[tuple[Tensor, Tensor]]:
        chosen: ImageSplit = getattr(self.data, split)
        every = torch.arange(len(chosen.labels))
        mine = every.tensor_split(accelerator.num_processes)[accelerator.process_index]
        model.eval()

        def read() -> Iterator[tuple[Tensor, Pixels]]:
            for first in in_step(len(every), accelerator.num_processes, _EVALUATED_AT_ONCE):
                index = mine[first : first + _EVALUATED_AT_ONCE]
                yield index, self._plain_views(chosen, index if len(index) else every[:1])

        for index, views in ahead(read()) if self.recipe.train.workers else read():
            inputs = views.to(accelerator.device)
            with accelerator.autocast():
                logits: Tensor = model(inputs)
            if len(index):
                yield logits.float(), chosen.labels[index]

    def fold_temperature(self, model: nn.Module, temperature: float) -> None:
        if isinstance(model, VisionTransformer):
            model = model.classifier
        elif isinstance(model, FolderClassifier):
            model = model.output_layer
        super().fold_temperature(model, temperature)

    @torch.no_grad()
    def examples(self, model: nn.Module, split: str, accelerator: Accelerator) -> dict[str, Any]:
        """The least confident predictions, and the first image."""
        chosen: ImageSplit = getattr(self.data, split)
        index = torch.arange(min(len(chosen.labels), _EVALUATED_AT_ONCE))
        model.eval()
        logits = model(self._plain_views(chosen, index).to(accelerator.device)).float().cpu()
        unsure = logits.softmax(-1).amax(-1).argsort(stable=True).tolist()
        shown = dict.fromkeys([*unsure[: _EXPLORED - 1], 0])
        names = list(self.data.classes)
        examples = [
            {
                "title": f"{_title(chosen, i)}: {names[chosen.labels[i]]}",
                "target": int(chosen.labels[i]),
                "logits": [round(z, 4) for z in logits[i].tolist()],
                "image": _picture(chosen.images[i]),
                "context": None,
            }
            for i in shown
        ]
        return {"classes": names, "examples": examples}

    def _plain_views(self, split: ImageSplit, index: Tensor) -> Pixels:
        images = split.images
        if isinstance(images, Tensor):
            return Pixels(images[index], self._normalized)
        return Pixels(self._read(images, index, [self._view] * len(index)), self._normalized)


TASK = ImageTask


def _fresh_model(facts: Mapping[str, Any], key: str = "model.name") -> nn.Module:
    name, sizes = facts["model"], (facts["num_classes"], facts["in_channels"])
    if is_reference(name):
        given = {"num_classes": sizes[0], "in_channels": sizes[1]}
        own = call_function(key, name, given, facts.get("options", {}))
        if not isinstance(own, nn.Module):
            raise RequestError(
                f"{key}: {name} must return a torch.nn.Module, not {type(own).__name__}"
            )
        return own
    if name in TRANSFORMERS:
        return VisionTransformer(name, *sizes, **facts["options"])
    return CONVNETS[name](*sizes)


def _activation_bytes(model: nn.Module, channels: int, view: View) -> int:
    """The bytes that the forward pass of one image keeps for the backward pass."""
    kept = 0

    def count(tensor: Tensor) -> Tensor:
        nonlocal kept
        kept += 0 if isinstance(tensor, nn.Parameter) else tensor.nbytes
        return tensor

    with torch.random.fork_rng(devices=[]):
        model.eval()  # the statistics of batch norm stay
        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            model(torch.zeros(1, channels, view.height, view.width))
        model.train()
    return kept


def _title(split: ImageSplit, index: int) -> str:
    images = split.images
    return f"image {index}" if isinstance(images, Tensor) else images.names[index]


def _picture(image: Tensor) -> str:
    """An image as a data URL; small images are enlarged."""
    size = _LARGEST_AUTO
    large = image.shape[-1] > size
    pixels = resized(image, partial(center_window, resize=size, size=size)) if large else image
    array = pixels.permute(1, 2, 0).numpy()
    picture = Image.fromarray(array.squeeze(-1) if array.shape[-1] == 1 else array)
    scale = max(1, 128 // picture.width)
    picture = picture.resize((picture.width * scale, picture.height * scale), Image.Resampling.BOX)
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def _packed(row: Tensor) -> str:
    """Numbers as float32 in base64: a quarter of the size of their digits."""
    return base64.b64encode(row.numpy().astype("<f4").tobytes()).decode()


def _records(log_p: Tensor, split: ImageSplit) -> Iterator[dict[str, Any]]:
    """One record per image, with the name of its file if it has one."""
    names = None if isinstance(split.images, Tensor) else split.images.names
    for index, (row, label) in enumerate(zip(log_p.exp(), split.labels.tolist(), strict=True)):
        confidence, prediction = row.max(-1)
        yield {
            "index": index,
            **({} if names is None else {"file": names[index]}),
            "label": label,
            "prediction": int(prediction),
            "confidence": float(confidence),
            "probabilities": row.tolist() if len(row) <= _LISTED_CLASSES else _packed(row),
        }
