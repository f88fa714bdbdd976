"""Models that take speech or images, make maps, or have virtual tokens before their inputs."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from peft import PrefixTuningConfig, PromptTuningConfig, TaskType, get_peft_model
from torch import nn

import labo
from labo.integrations import huggingface as hf
from tiny_models import (
    V,
    arguments,
    assert_step,
    build,
    examples,
)

LAYERS = {
    f"{end}_{name}": size
    for end in ("encoder", "decoder")
    for name, size in (("layers", 1), ("ffn_dim", 48), ("attention_heads", 4))
}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}


def decoder(cls, **settings):
    sizes = {"d_model": 32, "decoder_layers": 1, "decoder_attention_heads": 4}
    sizes |= {"decoder_ffn_dim": 48, "max_position_embeddings": 32, "dropout": 0.0}
    return cls(vocab_size=V, **sizes, **settings)


def of_images(encoder, text):
    both = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(encoder, text)
    both.pad_token_id, both.decoder_start_token_id = 0, 1
    return transformers.VisionEncoderDecoderModel(config=both)


def made(name: str):
    """A model without dropout, and the features of one example."""
    torch.manual_seed(0)
    if name == "Whisper":
        config = transformers.WhisperConfig(
            vocab_size=V, d_model=32, num_mel_bins=8, max_source_positions=16, dropout=0.0,
            max_target_positions=32, **LAYERS, **SPECIAL,
        )  # fmt: skip
        return transformers.WhisperForConditionalGeneration(config), {"input_features": (8, 32)}
    if name == "Speech2Text":
        config = transformers.Speech2TextConfig(
            vocab_size=V, d_model=32, input_feat_per_channel=8, conv_channels=16, dropout=0.0,
            max_source_positions=64, max_target_positions=32, **LAYERS, **SPECIAL,
        )  # fmt: skip
        return transformers.Speech2TextForConditionalGeneration(config), {"input_features": (32, 8)}
    if name == "Moonshine":
        both = {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4}
        both = {f"{end}_{key}": x for end in ("encoder", "decoder") for key, x in both.items()}
        config = transformers.MoonshineConfig(
            vocab_size=V, hidden_size=32, intermediate_size=48, **both, **SPECIAL
        )
        return transformers.MoonshineForConditionalGeneration(config), {"input_values": (4000,)}
    if name == "TrOCR":
        vit = transformers.ViTConfig(
            hidden_size=24, num_hidden_layers=1, num_attention_heads=4, intermediate_size=48,
            image_size=8, patch_size=4,
        )  # fmt: skip
        return of_images(vit, decoder(transformers.TrOCRConfig)), {"pixel_values": (3, 8, 8)}
    if name == "Donut":
        swin = transformers.DonutSwinConfig(
            image_size=32, patch_size=4, embed_dim=8, depths=[1, 1], num_heads=[1, 2],
            window_size=4, drop_path_rate=0.0,
        )  # fmt: skip
        text = {"is_decoder": True, "is_encoder_decoder": False, "add_cross_attention": True}
        model = of_images(swin, decoder(transformers.MBartConfig, encoder_layers=1, **text))
        return model, {"pixel_values": (3, 32, 32)}
    text = {"vocab_size": V, "hidden_size": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1}
    vision = {"hidden_size": 32, "patch_embed_hidden_size": 12, "d_ff": 48, "d_kv": 8}
    vision |= {"num_hidden_layers": 1, "num_attention_heads": 4, "dropout_rate": 0.0}
    config = transformers.Pix2StructConfig(
        text_config={**text, "num_heads": 4, "dropout_rate": 0.0, **SPECIAL}, vision_config=vision
    )
    return transformers.Pix2StructForConditionalGeneration(config), {"flattened_patches": (6, 14)}


def features_and_labels(shapes: dict, count: int = 4) -> list[dict]:
    """What the usual collators of these models make: features and labels, no decoder inputs."""
    generator = torch.Generator().manual_seed(1)
    ((name, shape),) = shapes.items()
    rows = []
    for index in range(count):
        labels = torch.randint(3, V, (6,), generator=generator)
        labels[6 - index % 4 :] = -100
        rows.append({name: torch.rand(shape, generator=generator) + 0.5, "labels": labels})
    return rows


NAMES = ["Whisper", "Speech2Text", "Moonshine", "TrOCR", "Donut", "Pix2Struct"]


@pytest.mark.parametrize(
    ("way", "name"),
    [*(("regularized", name) for name in NAMES), ("fused", "Whisper"), ("fused", "Donut")],
)
def test_speech_and_images(way, name, tmp_path):
    """A step in two micro-batches is that of the model's own logits."""
    model, shapes = made(name)

    def by(model, batch, loss):
        return loss(model(**batch).logits, batch["labels"])  # it makes its decoder inputs

    def make(model, loss, args, data, **settings):
        model = hf.fuse_head(model, loss) if way == "fused" else model
        trainer = transformers.Trainer(model=model, args=args, train_dataset=data, **settings)
        return hf.regularize(trainer, loss)

    data, rows = features_and_labels(shapes), transformers.default_data_collator
    assert_step(make, model, labo.LABOLoss(), data, tmp_path, accumulate=2, by=by, rows=rows)


# ------------------------------------------------------------------ segmentation


def segformer():
    torch.manual_seed(0)
    config = transformers.SegformerConfig(
        num_labels=8, hidden_sizes=[8] * 4, depths=[1] * 4, num_attention_heads=[1] * 4,
        decoder_hidden_size=8, classifier_dropout_prob=0.0, drop_path_rate=0.0,
    )  # fmt: skip
    return transformers.SegformerForSemanticSegmentation(config).eval()


def maps(count: int) -> list[dict]:
    """Images of 32 x 32, whose logits have 8 classes of 8 x 8; some pixels have no class."""
    generator = torch.Generator().manual_seed(1)
    rows = []
    for index in range(count):
        labels = torch.randint(8, (32, 32), generator=generator)
        labels[: 8 * index] = 255
        image = torch.randn(3, 32, 32, generator=generator)
        rows.append({"pixel_values": image, "labels": labels})
    return rows


def test_segmentation(tmp_path):
    """The model's own loss is the reference: enlarged logits, without the pixels of 255."""
    model, data = segformer(), maps(4)
    expected = copy.deepcopy(model)  # batch norm: the statistics stay those of the start
    batch = transformers.default_data_collator(data)
    own = expected(**batch).loss
    args = arguments(tmp_path, max_steps=1, per_device_train_batch_size=2)
    args.gradient_accumulation_steps = 2
    trainer = transformers.Trainer(model=model, args=args, train_dataset=data)
    hf.regularize(trainer, labo.CrossEntropyLoss())
    valid = int((batch["labels"] != 255).sum())
    assert trainer._get_num_items_in_batch([batch], torch.device("cpu")) == valid
    value = trainer.compute_loss(model, batch, num_items_in_batch=valid)
    torch.testing.assert_close(value, own)
    with torch.no_grad():
        torch.testing.assert_close(trainer.compute_loss(model, batch), own.detach())
    trainer.train()


def test_maps_of_a_model_of_ones_own(tmp_path):
    class Maps(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 5, 1)

        def forward(self, pixel_values, labels=None):
            return {"logits": self.conv(pixel_values)}

    torch.manual_seed(0)
    model = Maps()
    trainer = transformers.Trainer(model=model, args=arguments(tmp_path))
    hf.regularize(trainer, labo.LABOLoss(), shift=False)
    images, labels = torch.randn(2, 3, 4, 6), torch.randint(5, (2, 4, 6))
    value = trainer.compute_loss(model, {"pixel_values": images, "labels": labels})
    torch.testing.assert_close(value, labo.LABOLoss(dim=1)(model.conv(images), labels))


def test_an_auxiliary_head_is_refused(tmp_path):
    config = segformer().config
    config.use_auxiliary_head = True
    model = transformers.SegformerForSemanticSegmentation(config)
    trainer = transformers.Trainer(model=model, args=arguments(tmp_path))
    with pytest.raises(ValueError, match="load it with use_auxiliary_head=False"):
        hf.regularize(trainer, labo.LABOLoss())


# ------------------------------------------------------------------ virtual tokens


def prompted(kind: str):
    torch.manual_seed(0)
    config = {"PromptTuning": PromptTuningConfig, "PrefixTuning": PrefixTuningConfig}[kind]
    return get_peft_model(
        build("Llama"), config(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=3)
    )


@pytest.mark.filterwarnings("ignore:.*past_key_values")
@pytest.mark.parametrize("kind", ["PromptTuning", "PrefixTuning"])
@pytest.mark.parametrize("way", ["regularized", "compute_loss_func", "fused"])
def test_prompts_that_are_learned(way, kind, tmp_path):
    """The last virtual token predicts the first label, as in the loss of PEFT."""

    def make(model, loss, args, data, **settings):
        model = hf.fuse_head(model, loss) if way == "fused" else model
        if way == "compute_loss_func":
            settings["compute_loss_func"] = hf.compute_loss_func(model, loss)
        trainer = transformers.Trainer(model=model, args=args, train_dataset=data, **settings)
        return trainer if way == "compute_loss_func" else hf.regularize(trainer, loss)

    loss = labo.CrossEntropyLoss()
    fixed = {"accumulate": 2, "by": lambda model, batch, _: model(**batch).loss}  # PEFT's own
    assert_step(make, prompted(kind), loss, examples(4), tmp_path, **fixed)
