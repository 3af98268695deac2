"""Hugging Face models whose ranks take different ways at stage 3: layer drop, and images in some batches only."""

from __future__ import annotations

import os

import pytest
import torch
from parity_models import assert_bitwise, assert_close, make_config, train, train_plainly
from stage3_models import seeded
from way_models import one_group

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers")

STEPS = 5
SIZES = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 4, "num_attention_heads": 2}
SGD = {"type": "SGD", "params": {"lr": 0.1}}
"""Some biases have no gradient but rounding, of which Adam makes steps."""
ZERO = {"stage3_param_persistence_threshold": 0, "reduce_bucket_size": 300}


def speech(kind):
    """Layers are dropped by chance, as in pretraining."""
    convolutions = {"conv_dim": (8, 8), "conv_stride": (3, 2), "conv_kernel": (5, 3), "num_feat_extract_layers": 2}
    still = dict.fromkeys(("hidden_dropout", "attention_dropout", "activation_dropout", "feat_proj_dropout"), 0.0)
    config = getattr(transformers, f"{kind}Config")(
        **SIZES,
        **convolutions,
        **still,
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
        layerdrop=0.5,
        apply_spec_augment=False,
    )
    return getattr(transformers, f"{kind}Model")(config)


def llava():
    vision = transformers.CLIPVisionConfig(**SIZES, image_size=4, patch_size=2)
    text = transformers.LlamaConfig(vocab_size=17, num_key_value_heads=1, **SIZES)
    config = transformers.LlavaConfig(
        vision_config=vision, text_config=text, image_token_index=16, vision_feature_layer=-1
    )
    return transformers.LlavaForConditionalGeneration(config)


def speech_loss(model, step, micro, rank):
    seed = 100 * step + 10 * micro + rank
    sound = torch.randn(2, 90, generator=torch.Generator().manual_seed(seed))
    torch.manual_seed(seed)  # by which layers are dropped
    return model(sound).last_hidden_state[..., :3].square().mean()


def llava_loss(model, step, micro, rank):
    generator = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
    tokens = torch.randint(0, 16, (1, 6), generator=generator)
    if (step + rank) % 2:
        tokens = torch.cat([torch.full((1, 4), 16), tokens], 1)
        return model(tokens, torch.randn(1, 3, 4, 4, generator=generator), labels=tokens).loss
    return model(tokens, labels=tokens).loss


MODELS = {
    "Wav2Vec2": (seeded(lambda: speech("Wav2Vec2")), speech_loss),
    "Hubert": (seeded(lambda: speech("Hubert")), speech_loss),
    "Llava": (seeded(llava), llava_loss),
}


def train_here(communicator, name):
    build, loss = MODELS[name]
    model = build()
    model.train()
    config = make_config(3, zero=ZERO, optimizer=SGD)
    return train(communicator, model, config, STEPS, loss, groups=one_group)


@pytest.mark.parametrize("name", MODELS)
def test_they_train_like_plain_torch(rank_pool, name):
    build, loss = MODELS[name]
    first, *others = rank_pool(2).run(train_here, name)
    for run in others:
        assert_bitwise(run.params, first.params)
    make = lambda groups: torch.optim.SGD(groups, **SGD["params"])  # noqa: E731
    plain = train_plainly(2, STEPS, build=lambda: build().train(), loss_fn=loss, groups=one_group, make_optimizer=make)
    assert_close(first.params, plain.params, 1e-5)
