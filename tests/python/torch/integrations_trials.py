"""The integrations of Optuna and Lightning, with those libraries: what comes back, what stays, and who holds it."""

# packages: integrations

import logging
import os
import subprocess
import sys
import warnings

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "..", "standin"))
warnings.simplefilter("ignore")

import optuna
import torch
from _integrations import MIB, Warned, allocated, big, nothing_left
from bench import main, raises
from torch import nn

import unhand
from unhand.integrations import optuna as of_optuna

optuna.logging.set_verbosity(optuna.logging.ERROR)


CACHE = []


def check_each_trial_begins_at_the_floor():
    before = big()
    floor = nothing_left()
    seen, landings = [], []

    @of_optuna.trial(on_landing=lambda trial, landing: landings.append((trial.number, landing)))
    def objective(trial):
        """The objective."""
        seen.append(allocated())
        model = nn.Linear(1024, 1024).cuda()
        loss = model(torch.zeros(4, 1024, device="cuda")).square().mean()
        loss.backward()
        # A cycle, as trainers and their callbacks are.
        model.owner = model
        if trial.number == 1:
            raise optuna.TrialPruned()
        if trial.number == 2:
            raise RuntimeError("failed")
        if trial.number == 3:
            torch.empty(1 << 50, device="cuda")
        return loss

    assert objective.__doc__ == "The objective." and objective.__wrapped__
    study = optuna.create_study()
    with Warned() as warned:
        study.optimize(objective, n_trials=5, catch=(RuntimeError,))
    assert seen == [floor] * 5, (seen, floor)
    states = [trial.state.name for trial in study.trials]
    assert states == ["COMPLETE", "PRUNED", "FAIL", "FAIL", "COMPLETE"] and study.best_value == 0.0, states
    # One report of the error; a landing is told only of trials that return.
    assert len(warned.texts) == 1 and "trial 3 ran out of memory" in warned.texts[0], warned.texts
    assert [number for number, _ in landings] == [0, 4] and all(each.left_bytes == 0 for _, each in landings)
    assert before.shape == (MIB,)


def check_what_a_trial_leaves_is_named():
    before = big()
    floor = nothing_left()

    def objective(trial):
        CACHE.append(big(8))
        model = nn.Linear(1024, 1024, bias=False).cuda()
        trial.set_user_attr("model", model)
        before.zero_()
        return 1.0

    study = optuna.create_study()
    with Warned() as warned:
        study.optimize(of_optuna.trial(objective), n_trials=1)
    assert allocated() == floor + 12 * MIB and len(warned.texts) == 1, warned.texts
    assert "trial 0" in warned.texts[0] and "__main__.CACHE" in warned.texts[0] and "12.0 MiB above" in warned.texts[0]
    assert "user_attrs" in warned.texts[0], warned.texts[0]
    # The other way: all that was born in the trial goes, and nothing else.
    with Warned() as warned:
        study.optimize(of_optuna.trial(objective, everything=True), n_trials=1)
    assert allocated() == floor + 12 * MIB and not warned.texts, warned.texts
    raises(unhand.FreedError, lambda: CACHE[1] + 1)
    assert (CACHE[0] + 1).shape == (2 * MIB,) and (before + 1).shape == (MIB,)
    CACHE.clear()


def module(pl, fails=False):
    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(1024, 1024)

        def training_step(self, batch, index):
            loss = self.net(batch[0]).square().mean()
            if fails and index == 1:
                torch.empty(1 << 50, device="cuda")
            return loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters())

    return Module()


class Figures:
    """What was logged."""

    def __init__(self, pl):
        class Logger(pl.loggers.logger.Logger):
            name, version, seen = "memory", 0, []

            def log_metrics(self, metrics, step=None):
                self.seen.append((step, metrics))

            def log_hyperparams(self, *args, **kwargs):
                pass

        self.logger = Logger()


def fit(pl, data, fails=False, callbacks=(), logger=False):
    options = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    options |= {"logger": logger, "log_every_n_steps": 1, "callbacks": [*callbacks]}
    one = pl.Trainer(max_steps=3, accelerator="gpu", devices=1, **options)
    return one, module(pl, fails), torch.utils.data.DataLoader(data, batch_size=4, num_workers=0)


def check_a_fit_of_lightning():
    import lightning.pytorch
    import pytorch_lightning

    from unhand.integrations import lightning as of_lightning

    for name in ("lightning.pytorch", "pytorch_lightning"):
        logging.getLogger(name).setLevel(logging.ERROR)
    assert issubclass(of_lightning.MemoryCallback, lightning.pytorch.Callback)
    assert issubclass(of_lightning.MemoryCallback, pytorch_lightning.Callback), "one class for both packages"
    # The user's: the data set is on the GPU already.
    data = torch.utils.data.TensorDataset(torch.zeros(16, 1024, device="cuda"))
    floor = nothing_left()
    for pl in (lightning.pytorch, pytorch_lightning):
        callback = of_lightning.MemoryCallback(release=True)
        figures = Figures(pl)
        one, model, loader = fit(pl, data, callbacks=[callback], logger=figures.logger)
        one.fit(model, loader)
        steps = [step for step, metrics in figures.logger.seen if "gpu_memory/allocated_bytes" in metrics]
        assert len(steps) == 3, figures.logger.seen
        assert figures.logger.seen[-1][1]["gpu_memory/peak_allocated_bytes"] > 12 * MIB, figures.logger.seen
        assert callback.watch.verdict().step == 3, callback.watch.verdict()
        assert allocated() == floor and callback.freed is not None, callback.freed
        # Lightning brought it to the host, where it can be used.
        assert model.net(torch.zeros(1, 1024)).shape == (1, 1024)
        figures.logger.seen.clear()
    one, model, loader = fit(lightning.pytorch, data, fails=True)
    with Warned() as warned:
        try:
            with of_lightning.session(one) as session:
                one.fit(model, loader)
        except torch.OutOfMemoryError as error:
            kept = error
    assert allocated() == floor and session.landing.left_bytes == 0, session.landing
    assert session.report is not None and kept is not None and len(warned.texts) == 1, warned.texts
    assert data.tensors[0].sum().item() == 0


def check_nothing_is_imported_before_it_is_asked_for():
    script = (
        "import sys, unhand, unhand.integrations; unhand.integrations.optuna;"
        "print(sorted({'torch', 'transformers', 'optuna', 'accelerate'} & set(sys.modules)), dir(unhand.integrations)[-8:])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("[] ["), done.stdout


if __name__ == "__main__":
    main(globals())
