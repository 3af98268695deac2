"""Three steps of a small model over whatever communicator is the default one."""

from __future__ import annotations


def norm_of_three_steps(stage: int) -> float:
    """The gradient norm of the third step, the same on every rank and at every stage."""
    import torch

    import polyaccel
    from polyaccel import comm

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)])
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    engine = polyaccel.initialize(model=model, config=config)[0]
    for step in range(3):
        torch.manual_seed(10 * step + comm.get_rank())
        loss = engine(torch.randn(2, 64)).square().mean()
        engine.backward(loss)
        engine.step()
    norm = engine.get_global_grad_norm()
    engine.destroy()
    assert norm is not None
    return norm
