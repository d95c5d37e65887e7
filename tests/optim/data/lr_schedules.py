"""Records the learning rates of lr_schedule_test.cpp: `python lr_schedules.py > lr_schedules.txt`.

Each line has a name and the lr of SGD(lr=1) before each step. Needs torch and transformers.
"""

import torch
import transformers

NUM_STEPS = 24


def record(name, make, num_steps=NUM_STEPS):
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], 1.0)
    schedule = make(optimizer)
    lrs = []
    for _ in range(num_steps):
        lrs.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if len(lrs) < num_steps:
            schedule.step()
    print(name, *map(repr, lrs))


def one_cycle(**options):
    return lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, cycle_momentum=False, **options)


if __name__ == "__main__":
    hf = transformers
    record("constant", lambda o: hf.get_constant_schedule_with_warmup(o, 4))
    record("linear", lambda o: hf.get_linear_schedule_with_warmup(o, 4, 10))
    record("linear_without_warmup", lambda o: hf.get_linear_schedule_with_warmup(o, 0, 4))
    record("polynomial", lambda o: hf.get_polynomial_decay_schedule_with_warmup(o, 4, 10, lr_end=0.1, power=2.0))
    # Cosines rise again after their end.
    record("cosine", lambda o: hf.get_cosine_schedule_with_warmup(o, 4, 10), 11)
    record("cosine_min_lr", lambda o: hf.get_cosine_with_min_lr_schedule_with_warmup(o, 4, 10, min_lr_rate=0.1), 11)
    record("cosine_restarts", lambda o: hf.get_cosine_with_hard_restarts_schedule_with_warmup(o, 3, 20, num_cycles=3))
    record("cosine_one_cycle", lambda o: hf.get_cosine_with_hard_restarts_schedule_with_warmup(o, 3, 20))
    record("wsd", lambda o: hf.get_wsd_schedule(o, 4, 6, num_training_steps=20))
    record("wsd_linear", lambda o: hf.get_wsd_schedule(o, 4, 6, num_training_steps=20, decay_type="linear",
                                                        min_lr_ratio=0.1))
    record("wsd_sqrt", lambda o: hf.get_wsd_schedule(o, 0, 7, num_training_steps=20, decay_type="1-sqrt",
                                                      min_lr_ratio=0.1))
    record("wsd_without_decay", lambda o: hf.get_wsd_schedule(o, 4, 0, num_training_steps=20))
    record("one_cycle", one_cycle(total_steps=NUM_STEPS))
    record("one_cycle_linear", one_cycle(total_steps=NUM_STEPS, pct_start=0.1, anneal_strategy="linear",
                                         div_factor=10.0, final_div_factor=100.0))
    record("one_cycle_three_phase", one_cycle(total_steps=NUM_STEPS, three_phase=True))
    record("one_cycle_long_rise", one_cycle(total_steps=NUM_STEPS, pct_start=0.6, three_phase=True))
    record("one_cycle_no_rise", one_cycle(total_steps=NUM_STEPS, pct_start=0.0))
