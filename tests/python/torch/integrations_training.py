"""The integrations of transformers, accelerate and PEFT, with those libraries: what comes back, and what stays."""

# packages: integrations

import os
import sys
import tempfile
import warnings

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "..", "standin"))
warnings.simplefilter("ignore")

import accelerate
import optuna
import peft
import torch
import transformers
from _integrations import MIB, Warned, allocated, big, nothing_left
from bench import main, raises
from torch import nn

import unhand
from unhand.integrations import accelerate as of_accelerate
from unhand.integrations import peft as of_peft
from unhand.integrations import transformers as of_transformers

transformers.logging.set_verbosity_error()
optuna.logging.set_verbosity(optuna.logging.WARNING)


class Data(torch.utils.data.Dataset):
    """A data set with a table on the GPU, which is the user's."""

    def __init__(self):
        self.table = big()

    def __len__(self):
        return 16

    def __getitem__(self, index):
        return {"input_ids": torch.arange(16) + index, "labels": torch.arange(16) + index}


class Knows(transformers.TrainerCallback):
    """A callback that knows its trainer, as many do, and has memory of its own."""

    def __init__(self):
        self.trainer, self.own = None, big()


def gpt2():
    config = transformers.GPT2Config(vocab_size=512, n_positions=32, n_embd=256, n_layer=2, n_head=2)
    config.bos_token_id = config.eos_token_id = None
    return transformers.GPT2LMHeadModel(config)


FOLDER = tempfile.TemporaryDirectory()
ARGUMENTS = {
    "output_dir": FOLDER.name, "max_steps": 2, "per_device_train_batch_size": 4, "report_to": [], "disable_tqdm": True,
    "logging_steps": 1, "save_strategy": "no",
}


def trainer(**options):
    return transformers.Trainer(args=transformers.TrainingArguments(**ARGUMENTS), **options)


def bytes_of(module):
    return sum(parameter.numel() * 4 for parameter in module.parameters())


def check_a_trainer_gives_back_all_but_the_model():
    data, model, callback = Data(), gpt2(), Knows()
    floor = nothing_left()
    callback.trainer = one = trainer(model=model, train_dataset=data, callbacks=[callback])
    log = of_transformers.log_memory(one)
    one.train()
    logged = one.state.log_history[0]
    assert logged["gpu_memory/allocated_bytes"] > bytes_of(model) and one.callback_handler.callbacks[0] is log, logged
    assert log.watch.verdict().step == 2, log.watch.verdict()
    assert allocated() > floor + 3 * bytes_of(model)
    # What people do: the accelerator is told, and the state is there as before.
    before = allocated()
    one.accelerator.free_memory()
    assert allocated() == before
    freed = of_transformers.release(one, keep=model)
    assert floor + bytes_of(model) <= allocated() < floor + bytes_of(model) + MIB, freed
    assert freed.returned_bytes > 2 * bytes_of(model), freed
    # The model goes on, with a new state.
    one.train()
    assert model(torch.zeros(1, 4, dtype=torch.long, device="cuda")).logits.shape == (1, 4, 512)
    freed = of_transformers.release(one)
    assert allocated() == floor, freed
    raises(unhand.FreedError, lambda: model(torch.zeros(1, 4, dtype=torch.long, device="cuda")), "unhand.free")
    assert data.table.shape == (MIB,) and (data.table + callback.own).shape == (MIB,), "the data set's and the callback's"
    assert not one.accelerator._models and not one.accelerator._optimizers


def check_trials_begin_at_the_floor():
    floors = []

    def model_init():
        floors.append(allocated())
        return gpt2()

    floor = nothing_left()
    one = trainer(model_init=model_init, train_dataset=torch.utils.data.Subset(Data(), range(16)))
    floor += 4 * MIB
    floors.clear()
    search = {"backend": "optuna", "n_trials": 2, "compute_objective": lambda metrics: 0.0,
              "hp_space": lambda trial: {"learning_rate": trial.suggest_float("learning_rate", 1e-5, 1e-4)}}
    one.eval_dataset = one.train_dataset
    one.hyperparameter_search(**search)
    assert floors[-1] > floor + 3 * MIB, f"the last model is there while the next is made: {floors}"
    of_transformers.release_between_trials(one)
    floors.clear()
    one.hyperparameter_search(**search)
    assert len(floors) == 2 and all(each == floor for each in floors), (floors, floor)
    of_transformers.release(one)
    assert allocated() == floor
    raises(ValueError, lambda: of_transformers.release_between_trials(trainer(model=gpt2())), "`model_init`")


def check_a_session_after_an_out_of_memory_error():
    floor = nothing_left()

    class Hungry(transformers.Trainer):
        def training_step(self, *args, **kwargs):
            loss = super().training_step(*args, **kwargs)
            batch = big(8)
            torch.empty(1 << 50, device="cuda")
            return loss, batch

    one = Hungry(model=gpt2(), args=transformers.TrainingArguments(**ARGUMENTS), train_dataset=Data())
    with Warned() as warned:
        try:
            with of_transformers.session(one) as session:
                one.train()
        except torch.OutOfMemoryError as error:
            remembered = error
    assert session.landing.left_bytes == 0, session.landing
    assert allocated() == floor + 4 * MIB, f"the data set's table stays:\n{session.landing}"
    assert "an exception in flight: OutOfMemoryError" in str(session.report), session.report
    assert len(warned.texts) == 1 and "ran out of memory" in warned.texts[0], warned.texts
    lines = []
    step = remembered.__traceback__
    while step:
        lines.append(step.tb_frame.f_code.co_name)
        step = step.tb_next
    assert "training_step" in lines, "the lines of the error are there, without the locals"


def check_an_accelerator():
    floor = nothing_left()
    accelerator = accelerate.Accelerator()
    model = nn.Linear(1024, 1024)
    optimizer = torch.optim.AdamW(model.parameters())
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.zeros(8, 1024)), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for (batch,) in loader:
        accelerator.backward(model(batch).square().mean())
        optimizer.step()
    del batch
    mine = model
    # Theirs sets names of its own to None: the model and the state are there when it returns.
    accelerate.utils.release_memory(model, optimizer)
    assert allocated() > floor + 12 * MIB
    reserved = torch.cuda.memory_reserved()
    freed = of_accelerate.release(accelerator)
    assert allocated() == floor and freed.returned_bytes == reserved, freed
    assert (accelerator._models, accelerator._optimizers, accelerator._dataloaders) == ([], [], []) and mine is model
    # The accelerator is as good as new.
    other = nn.Linear(8, 8)
    other, other_optimizer = accelerator.prepare(other, torch.optim.AdamW(other.parameters()))
    accelerator.backward(other(torch.zeros(2, 8, device="cuda")).sum())
    other_optimizer.step()
    with of_accelerate.session(accelerator, keep=other) as session:
        pass
    assert other(torch.zeros(2, 8, device="cuda")).shape == (2, 8) and accelerator._models == [other], session.landing


class Raises(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(MIB))

    def forward(self, x):
        raise KeyError("nothing here")


def check_offload_to_the_last_link():
    floor = nothing_left()
    one, two = nn.Linear(1024, 1024), nn.Linear(1024, 1024)
    one, hook_1 = accelerate.cpu_offload_with_hook(one, 0)
    two, hook_2 = accelerate.cpu_offload_with_hook(two, 0, prev_module_hook=hook_1)
    two(one(torch.zeros(1, 1024)))
    nothing_left()
    assert allocated() > floor + 3 * MIB, "nobody offloads the last one"
    with of_accelerate.offloading(hook_1, hook_2):
        two(one(torch.zeros(1, 1024)))
    assert allocated() == floor
    # By modules, and after an error in the middle of `forward`.
    broken = accelerate.cpu_offload(nn.Sequential(nn.Linear(8, 8), Raises()), torch.device("cuda:0"))
    raises(KeyError, lambda: broken(torch.zeros(1, 8)))
    nothing_left()
    assert allocated() >= floor + 4 * MIB, "the hook after `forward` did not run"
    freed = of_accelerate.offload(broken)
    assert allocated() == floor, freed
    assert broken[1].weight.device.type == "meta" and broken[0](torch.zeros(1, 8)).shape == (1, 8)


def lora():
    base = nn.Sequential(*[nn.Linear(512, 512) for _ in range(2)]).cuda()
    config = peft.LoraConfig(r=64, target_modules=["0", "1"])
    model = peft.get_peft_model(base, config, adapter_name="a")
    model.add_adapter("b", config)
    model.add_adapter("c", config)
    model.set_adapter("c")
    return model


def check_adapters_go():
    floor = nothing_left()
    model = lora()
    found = of_peft.adapters(model)
    size = 2 * 2 * 64 * 512 * 4
    assert [(each.name, each.requested_bytes, each.is_active) for each in found] == [
        ("a", size, False), ("b", size, False), ("c", size, True)
    ], found
    mine = model.base_model.model[0].lora_A["a"].weight
    before = allocated()
    freed = of_peft.release(model)
    assert before - allocated() == 2 * size, freed
    raises(unhand.FreedError, lambda: mine + 1)
    assert [each.name for each in of_peft.adapters(model)] == ["c"]
    raises(ValueError, lambda: of_peft.release(model, "a"), "`a`")
    optimizer = torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad])
    model(torch.zeros(2, 512, device="cuda")).sum().backward()
    optimizer.step()
    base = of_peft.unload(model, optimizer=optimizer)
    assert type(base[0]) is nn.Linear and base(torch.zeros(2, 512, device="cuda")).shape == (2, 512)
    assert not optimizer.state and not optimizer.param_groups[0]["params"]
    # A gradient of a base weight and what a kernel needs are no adapter's.
    nothing_left()
    assert allocated() - floor == bytes_of(base), unhand.report()


if __name__ == "__main__":
    main(globals())
