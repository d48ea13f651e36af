"""The floor of the integrations: what was born since goes, what was there before stays, and what a run leaves is named."""

import json
import logging
import os
import sys
import threading

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "..", "standin"))

import torch
from bench import main, raises
from torch import nn

import unhand
from unhand import _floor
from unhand.integrations import _session

MIB = 1 << 20


def big(mib=4):
    return torch.zeros(mib * MIB // 4, device="cuda")


def allocated():
    return torch.cuda.memory_allocated()


class Thing:
    pass


def check_free_keeps_what_is_named():
    thing, model = Thing(), nn.Linear(1024, 1024, bias=False).cuda()
    thing.model, thing.more, thing.inside = model, big(), {"list": [big()]}
    # It knows its owner, as a module may know its trainer: what the owner has besides is not kept for that.
    model.owner = thing
    more = thing.more
    before = allocated()
    freed = unhand.free(thing, keep=[model, thing.inside["list"]])
    assert before - allocated() == 4 * MIB and freed.n_storages == 1, freed
    assert (model.weight + 1).shape == (1024, 1024) and (thing.inside["list"][0] + 1).shape == (MIB,)
    raises(unhand.FreedError, lambda: more + 1)
    unhand.free(thing, keep=model)
    assert before - allocated() == 8 * MIB
    dry = unhand.free(thing, keep=None, dry_run=True)
    assert dry.freed_bytes == 4 * MIB, dry


def check_a_view_of_what_is_kept():
    table = big()
    thing = Thing()
    thing.row, thing.other = table[:8], big()
    freed = unhand.free(thing, keep=table)
    assert (table + 1).shape == (MIB,) and (thing.row + 1).shape == (8,) and freed.n_storages == 1, freed


def check_the_floor_keeps_nothing_alive():
    one, two = big(), big()
    before = allocated()
    began = _floor.floor()
    assert began.allocated_bytes == before
    # Where it was there is another now: it came later, and is one that goes.
    address = two.data_ptr()
    del two
    assert allocated() == before - 4 * MIB
    later = big()
    assert later.data_ptr() == address
    landing = _floor.back_to(began, "a run", everything=True)
    assert landing.left_bytes == 0 and landing.allocated_bytes == before - 4 * MIB, landing
    raises(unhand.FreedError, lambda: later + 1)
    assert (one + 1).shape == (MIB,)


def check_what_is_left_is_named():
    before = big()
    floor = allocated()
    began = _floor.floor()
    left = {"table": big(), "rows": before[:4]}
    landing = _floor.back_to(began, "a run")
    assert (landing.left_bytes, landing.floor_bytes, landing.allocated_bytes) == (4 * MIB, floor, floor + 4 * MIB), landing
    assert len(landing.left) == 1 and landing.left[0].bytes == 4 * MIB and "local `left`" in landing.left[0].path, landing
    assert "4.0 MiB above its floor of" in str(landing) and landing.unattributed_bytes == 0
    plain = json.loads(json.dumps(landing.to_dict()))
    assert plain["schema_version"] == 1 and plain["left"][0]["bytes"] == 4 * MIB and "schema_version" not in plain["freed"]
    assert left["rows"].shape == (4,)


def check_the_users_of_a_target_are_no_part_of_it():
    trainer, data, callback = Thing(), Thing(), Thing()
    data.table, callback.own = big(), big()
    callback.trainer, trainer.data, trainer.callbacks, trainer.model = trainer, data, [callback], big()
    model = trainer.model
    _floor.release(trainer, without=[data, callback])
    raises(unhand.FreedError, lambda: model + 1)
    assert (data.table + callback.own).shape == (MIB,)


def check_a_run_returns_numbers_and_leaves_nothing():
    unhand.free()
    floor = allocated()

    def run(fails):
        model = nn.Linear(512, 512).cuda()
        model.owner = model
        loss = model(torch.zeros(2, 512, device="cuda")).sum()
        if fails:
            raise KeyError("in the run")
        return {"loss": loss, "all": [loss, loss], "text": "text"}

    value, landing = _session.run("a run", run, (False,))
    assert value == {"loss": 0.0, "all": [0.0, 0.0], "text": "text"} and landing.left_bytes == 0, (value, landing)
    assert allocated() == floor
    try:
        _session.run("a run", run, (True,))
    except KeyError as error:
        assert allocated() == floor, "the exception has the lines, and no locals"
        assert error.__traceback__.tb_next is not None
    assert not _session.returned and not list(_session._open)


def check_what_a_run_returns_is_named():
    texts = []
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())
    logging.getLogger("unhand").addHandler(handler)
    try:
        value, landing = _session.run("trial 7", lambda: {"score": 1.0, "model": big()})
    finally:
        logging.getLogger("unhand").removeHandler(handler)
    assert landing.left_bytes == 4 * MIB and "_session.returned" in landing.left[0].path, landing
    assert len(texts) == 1 and "trial 7" in texts[0] and (value["model"] + 1).shape == (MIB,)


def check_runs_side_by_side_leave_each_other_alone():
    inside, go, landings = threading.Event(), threading.Event(), []

    def slow():
        mine = big()
        inside.set()
        assert go.wait(60)
        return (mine + 1).numel()

    thread = threading.Thread(target=lambda: landings.append(_session.run("slow", slow, everything=True)))
    thread.start()
    assert inside.wait(60)
    value, _ = _session.run("quick", lambda: big().numel(), everything=True)
    go.set()
    thread.join()
    assert value == MIB and landings[0][0] == MIB, "what the other one had was not freed"


if __name__ == "__main__":
    main(globals())
