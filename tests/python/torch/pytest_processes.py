"""Sessions of pytest in processes of their own: the workers of pytest-xdist, and the stand-in."""
# packages: pytest

import json
import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "..", "standin"))

from _sessions import FOLDER, MIB, child, write
from bench import main


def check_workers_send_their_figures():
    """pytest-xdist with two workers: one section and one file, of what both found."""
    path = write("""
        kept = []
        @pytest.mark.limit_gpu("100 MiB")
        @pytest.mark.parametrize("n", range(4))
        def test_grows(n):
            big(10 + 2 * n)
        @pytest.mark.no_gpu_leak
        def test_leaks():
            kept.append(big(2))
        @pytest.mark.no_gpu_leak
        @pytest.mark.parametrize("n", range(2))
        def test_cycle(n):
            gc.disable()
            cycle = [big(2 + 2 * n)]
            cycle.append(cycle)
    """, "workers")
    report = os.path.join(FOLDER.name, "workers.json")
    done = child(path, "-p", "xdist", "-n2", f"--gpu-report-json={report}")
    text = done.stdout + done.stderr
    assert done.returncode == 1 and "7 passed, 1 error" in text, text
    assert text.count("= GPU memory =") == 1 and "4.0 MiB  test_workers.py::test_cycle[1]" in text, text
    assert "test_workers.kept[0]" in text, text
    with open(report, encoding="utf-8") as file:
        tests = json.load(file)["tests"]
    peaks = {test["nodeid"].partition("::")[2]: test["peaks"][0]["allocated_bytes"] for test in tests}
    assert len(peaks) == 7 and peaks["test_grows[3]"] == 16 * MIB, peaks


def check_the_session_starts_itself_on_the_stand_in():
    """This is the stand-in, so what is asked for is other devices: the session starts itself again with those."""
    path = write("""
        import os
        def on_three():
            assert WORD == "seen"
            x = torch.ones(4, device="cuda:2")
            print("printed")
            return [torch.cuda.device_count(), torch.cuda.mem_get_info(2)[1]]
        WORD = "seen"
        def test_devices():
            assert torch.cuda.device_count() == 2 and torch.cuda.mem_get_info()[1] == 4 << 30
        @pytest.mark.limit_gpu("3 MiB")
        def test_each_device_has_its_own():
            a = big(3, "cuda:0"); b = big(3, "cuda:1")
        @pytest.mark.limit_gpu("3 MiB")
        def test_the_other_device():
            a = big(1, "cuda:0"); b = big(5, "cuda:1")
        def test_child(standin):
            done = standin.run(on_three, devices=3, memory="2 GiB")
            assert done.value == [3, 2 << 30] and done.stdout == "printed\\n" and done.exit_code == 0
            with pytest.raises(Exception, match="from the child") as caught:
                standin.run("def fails():\\n    raise KeyError('from the child')\\nfails()")
            assert type(caught.value).__name__ == "StandinError" and "in fails" in str(caught.value)
    """, "standin")
    done = child(path, "--standin", "--standin-memory=4GiB", "--standin-devices=2", "-rf")
    assert done.returncode == 1 and "1 failed, 3 passed" in done.stdout, done.stdout + done.stderr
    assert "had 5.0 MiB of GPU memory allocated at its peak on cuda:1" in done.stdout, done.stdout


if __name__ == "__main__":
    main(globals())
