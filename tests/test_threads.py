"""One fit at a time in a process; inside a callback another model may be trained."""

import copy
import os
import threading

import pytest
import torch
from checkpoints import RUNS, fit, trainer_of

from exogym.callbacks import Every
from exogym.errors import ArgumentError
from exogym.testing import fingerprint

MAKE = RUNS["diloco bf16"][0]


def alone(**options):
    return fingerprint(fit(MAKE(), **options).model)


def test_of_four_fits_in_four_threads_one_is_right_and_the_others_are_refused():
    """Without the refusal their models differ from run to run: the generators belong to the process."""
    wanted = alone(callbacks=[Every(1, lambda loop: None)])
    inside, refused = threading.Event(), threading.Barrier(4)
    ended, errors = [], []

    def wait(loop):
        if loop.step == 3:
            inside.set()
            refused.wait(60)  # until the three others have tried

    def train(k):
        if k:
            inside.wait(60)
        try:
            ended.append(alone(callbacks=[Every(1, wait)]))
        except ArgumentError as error:
            errors.append(str(error))
            refused.wait(60)

    threads = [threading.Thread(target=train, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert ended == [wanted]
    assert len(errors) == 3 and all("one fit after the other, or run each fit in its own process" in e for e in errors)
    assert alone() == alone()  # the turn was given back


def test_a_fit_that_fails_gives_its_turn_back():
    def fail(loop):
        raise RuntimeError("in a callback")

    with pytest.raises(RuntimeError, match="in a callback"):
        alone(callbacks=[Every(2, fail)])
    found = []
    thread = threading.Thread(target=lambda: found.append(alone()))
    thread.start()
    thread.join(300)
    assert found == [alone()]


def test_a_callback_may_train_another_model_and_no_bit_of_either_changes():
    inner, wanted = [], alone()
    whole = alone(callbacks=[Every(5, lambda loop: None)])
    assert alone(callbacks=[Every(5, lambda loop: inner.append(alone(seed=3)))]) == whole
    assert inner == [alone(seed=3)] * 2 and inner[0] != wanted


def test_a_callback_cannot_train_the_model_that_is_being_trained():
    trainer = trainer_of()

    def again(loop):
        with pytest.raises(ArgumentError, match=r"already training this model.* copy\.deepcopy"):
            trainer_of(trainer.model).fit(MAKE(), num_nodes=2, max_steps=6, device="cpu")
        part = torch.nn.Sequential(trainer.model[0], torch.nn.Linear(8, 2))
        with pytest.raises(ArgumentError, match="already training this model"):
            trainer_of(part).fit(MAKE(), num_nodes=2, max_steps=6, device="cpu")
        fit(MAKE(), trainer=trainer_of(copy.deepcopy(trainer.model)), max_steps=6)

    assert fingerprint(fit(MAKE(), trainer=trainer, callbacks=[Every(5, again)]).model) == alone(
        callbacks=[Every(5, lambda loop: None)]
    )


def test_a_process_that_another_thread_forks_has_a_turn_of_its_own():
    codes = []

    def fork(loop):
        def in_thread():
            pid = os.fork()
            if not pid:
                try:
                    os._exit(0 if alone(max_steps=6) else 1)
                except BaseException:
                    os._exit(2)
            codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))

        thread = threading.Thread(target=in_thread)
        thread.start()
        thread.join(300)

    fit(MAKE(), max_steps=6, callbacks=[Every(3, fork)])
    assert codes == [0, 0]
