"""Takes the pictures of docs/ui.md: trains what they show, opens the page in Chromium, and writes PNG files.

    python docs/images/ui.py            into this folder
    python docs/images/ui.py FOLDER     into another

Beside them ui.json holds the headings, labels and buttons of each page, by which a test sees that the pictures are of
the page as it is. Needs chromium and chromium-driver (Debian) and `pip install -e '.[dev]'`.
"""

import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from PIL import Image, ImageChops
from selenium import webdriver

MOST_BYTES = 100_000
COLOURS = 128
WIDE, PHONE = (1100, 1000), (390, 844)
HOSTS = """
import json, math, time
from pathlib import Path

from exogym.core.base.files import write_json
from exogym.core.base.processes import described

folder, began = Path("runs/macs"), time.time()
folder.mkdir()
write_json(folder / "run.json", {"description": {"strategy": {"name": "DiLoCoStrategy", "H": 20}, "num_nodes": 3}})
while True:
    now, second = time.time(), time.time() - began
    step = 4000 + int(20 * second)
    status = {"state": "running", "step": step, "total_steps": 20_000, "process": described(), "heartbeat_s": now}
    write_json(folder / "status.json", status | {"started_s": began - 200})
    hosts = []
    for k, name in enumerate(("mac-a.local", "mac-b.local", "mac-c.local")):
        rate, is_silent = (9 + k + 3 * math.sin(0.4 * second + 2 * k)) * 1e6, k == 2
        at = 3990 if is_silent else step - 3 * k
        hosts.append({
            "address": name, "device": "mps", "ranks": [k], "state": "running", "restarts": 0, "rx_bps": rate,
            "tx_bps": 1.1 * rate, "heard_s": began - 25 if is_silent else now - k, "cpu_use": 0.31 + 0.04 * k,
            "cores": 10, "memory_bytes": (9 + k) * 1e9, "memory_total_bytes": 17.2e9, "run_memory_bytes": 2.1e9,
            "processes": [{"rank": k, "step": at, "restarts": 0, "quiet_s": second + 25 if is_silent else 0.2}],
        })
    write_json(folder / "hosts.json", {"process": described(), "ended": False, "hosts": hosts, "events": []})
    with open(folder / "records.jsonl", "a") as file:
        row = {"step": step, "node": None, "val_loss": 2 * math.exp(-step / 3000), "tx_bytes": 4e4 * step}
        print(json.dumps(row | {"wall_s": second + 200}), file=file)
    time.sleep(0.5)
"""
SINGLE = """
from torch import nn
from exogym import LocalTrainer
from exogym.data import digits
from exogym.faults import Faults
from exogym.strategy import DiLoCoStrategy

source = digits()
model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
trainer = LocalTrainer(model, source.train, source.val, loss_fn=nn.functional.cross_entropy)
trainer.fit(
    DiLoCoStrategy(H=10, lr=3e-3), num_nodes=4, max_steps=300, batch_size=8, val_interval=10, run_dir="runs/digits",
    network="10Mbps,20ms", step_seconds=[0.01, 0.01, 0.012, 0.02], timeline=True,
    faults=Faults(absent={2: [(120, 180)]}),
)
"""
ALIVE = """
import time
import torch
from exogym import LocalTrainer
from exogym.callbacks import Every
from exogym.strategy import DiLoCoStrategy
from exogym.testing import small_problem

model, data = small_problem()
trainer = LocalTrainer(model, data, data, loss_fn=torch.nn.functional.mse_loss)
trainer.fit(DiLoCoStrategy(H=5, lr=0.01), num_nodes=4, max_steps=2_000, batch_size=8, val_interval=5,
            run_dir="runs/alive", callbacks=[Every(5, lambda loop: time.sleep(0.5))])
"""
FAILING = ALIVE.replace('"runs/alive"', '"runs/failing", faults=Faults(absent={2: [(60, 2_000)]})').replace(
    "from exogym.strategy", "from exogym.faults import Faults\nfrom exogym.strategy"
)
NOTES = {"digits": (["baseline", "wifi"], "node 2 was away from step 120 to 180"), "sweep": (["H"], "")}
PAGES: dict[str, tuple[str, str]] = {  # picture to the address, and what is there once the page has come
    "run": ("#/run/digits", "document.querySelectorAll('.chart canvas').length > 4"),
    "nodes": ("#/run/digits", "document.querySelectorAll('section:not([hidden]) canvas.heat').length == 2"),
    "compare": ("#/compare/comparison", "document.querySelectorAll('.chart:not([hidden]) canvas').length > 1"),
    "two": ("#/compare/comparison%2Fddp-seed-0&comparison%2Fdiloco-H-10-seed-0",
            "document.querySelectorAll('#differences tbody tr').length > 4 && "
            "document.querySelectorAll('.chart:not([hidden]) canvas').length > 0"),
    "alive": ("#/run/alive", "document.querySelector('.tiles')?.textContent.includes('done at about')"),
    "failing": ("#/run/failing", "document.querySelector('.charts.one .chart')?.spans?.some(s => s.to - s.from > 100)"),
    "sweep": ("#/compare/sweep", "document.querySelectorAll('td.filled').length == 12 && "
              "document.querySelectorAll('.chart:not([hidden]) canvas').length > 1"),
    "hosts": ("#/hosts", "(window.first ??= Date.now()) < Date.now() - 20_000 && "
              "document.querySelectorAll('.host .spark').length > 1"),
    "runs": ("#/", "document.querySelectorAll('.state.ill').length == 1 && "
             "document.querySelectorAll('.spark').length > 3"),
    "new": ("#/new?line=compare+--strategies+ddp,diloco:H=20,fedavg+--nodes+4+--steps+200+--network+wifi",
            "document.getElementById('plan')?.textContent"),
    "dark": ("#/compare/comparison", "document.querySelectorAll('.chart:not([hidden]) canvas').length > 1"),
    "phone": ("#/compare/comparison", "document.querySelectorAll('.chart:not([hidden]) canvas').length > 1"),
}  # fmt: skip
ELEMENTS = """
const texts = (selector) => [...document.querySelectorAll(selector)].filter((one) => one.checkVisibility())
  .map((one) => [...one.childNodes].filter((child) => child.nodeType === 3).map((child) => child.textContent.trim())
    .join(" ").trim()).filter(Boolean);
return {headings: texts("h2, section h3, .chart h3"), heads: texts("thead th, thead th button"),
        labels: texts("label"), buttons: texts("main button:not(th button)")};
"""


def train(top: Path) -> list[subprocess.Popen[bytes]]:
    """Train what is shown, and return what goes on meanwhile: two runs, and the reports of three hosts."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    exogym = [sys.executable, "-m", "exogym"]
    options = ["--nodes", "4", "--seeds", "3", "--steps", "200"]
    compare = ["compare", "--strategies", "ddp,diloco:H=10,fedavg", "--network", "wifi", "--step-seconds", "10ms"]
    axes = ["--sweep", "H=5,10,20", "--sweep", "lr=0.001,0.01", "--sweep", "nodes=2,4"]
    (top / "train_digits.py").write_text(SINGLE)
    with open(top / "said", "wb") as said:
        for words in (
            [sys.executable, "train_digits.py"],
            [*exogym, *compare, *options, "--out", "compared"],
            [*exogym, "sweep", *axes, "--seeds", "2", "--steps", "60", "--out", "runs/sweep"],
        ):
            subprocess.run(words, cwd=top, env=environment, stdout=said, stderr=said, check=True)
        (compared,) = (top / "compared").iterdir()
        compared.rename(top / "runs" / "comparison")
        for name, (tags, note) in NOTES.items():
            words = [word for tag in tags for word in ("--tag", tag)]
            subprocess.run([*exogym, "runs", "note", name, "--text", note, *words], cwd=top, check=True, stdout=said)
        going = []
        for name, script in {"macs": HOSTS, "alive": ALIVE, "failing": FAILING}.items():
            (top / f"{name}.py").write_text(script)
            words = [sys.executable, f"{name}.py"]
            going.append(subprocess.Popen(words, cwd=top, env=environment, stdout=said, stderr=said))
        return going


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address of a page over `folder`."""
    words = [sys.executable, "-m", "exogym", "ui", "--runs", str(folder), "--port", "0", "--no-open"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as page:
        assert page.stdout is not None
        try:
            yield page.stdout.readline().strip()
        finally:
            page.terminate()


@contextlib.contextmanager
def browser() -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for word in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--hide-scrollbars"):
        options.add_argument(word)
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
    try:
        yield driver
    finally:
        driver.quit()


def wait_for(look: Callable[[], Any], what: str, within_s: float = 120.0) -> None:
    until = time.monotonic() + within_s
    while not look():
        if time.monotonic() > until:
            raise TimeoutError(what)
        time.sleep(0.2)


def shown(driver: Any, name: str) -> tuple[bytes, dict[str, list[str]]]:
    """Open a page; return its picture, and what is on it."""
    way, there = PAGES[name]
    size = {"width": WIDE[0], "height": WIDE[1], "deviceScaleFactor": 1, "mobile": False}
    if name == "phone":
        size |= {"width": PHONE[0], "height": PHONE[1], "mobile": True}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    scheme = {"name": "prefers-color-scheme", "value": "dark" if name == "dark" else "light"}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
    driver.execute_script("location.hash = '#/none'; location.hash = arguments[0]", way)
    wait_for(lambda: driver.execute_script(f"return {there}"), f"{name}: {there}")
    time.sleep(2.0)  # curves and pictures are drawn
    scroll = "document.querySelector('canvas.heat').closest('section').scrollIntoView()" if name == "nodes" else "0"
    driver.execute_script(scroll)
    time.sleep(0.3)
    return driver.get_screenshot_as_png(), driver.execute_script(ELEMENTS)


def small(png: bytes) -> bytes:
    """Return a picture with few colours, and nothing empty below."""
    out = io.BytesIO()
    image = Image.open(io.BytesIO(png)).convert("RGB")
    empty = Image.new("RGB", image.size, image.getpixel((0, image.height - 1)))
    box = ImageChops.difference(image, empty).getbbox()
    assert box is not None, "the picture is empty"
    image = image.crop((0, 0, image.width, min(box[3] + 16, image.height)))
    image.quantize(COLOURS, Image.Quantize.MAXCOVERAGE, 2, dither=Image.Dither.NONE).save(out, "PNG", optimize=True)
    return out.getvalue()


def take(target: Path) -> None:
    """Write the pictures and ui.json into `target`."""
    elements = {}
    with tempfile.TemporaryDirectory() as folder:
        top = Path(folder)
        going = train(top)
        try:
            with served(top / "runs") as address, browser() as driver:
                driver.get(address)
                for name in PAGES:
                    png, elements[name] = shown(driver, name)
                    data = small(png)
                    if len(data) > MOST_BYTES:
                        raise ValueError(f"ui_{name}.png has {len(data)} bytes: lower COLOURS or WIDE")
                    (target / f"ui_{name}.png").write_bytes(data)
        finally:
            for process in going:
                process.send_signal(signal.SIGINT)
            for process in going:
                process.wait()
    (target / "ui.json").write_text(json.dumps(elements, indent=1) + "\n")


if __name__ == "__main__":
    take(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
