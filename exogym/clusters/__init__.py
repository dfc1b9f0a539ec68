"""Job scripts for SLURM, and manifests for Kubernetes. (For Ray, use `Placement(engine="ray")`.)

You can write job scripts and manifests on any machine. To submit a job, you need a machine of the SLURM cluster:

>>> from pathlib import Path
>>> job = SlurmJob("train.py", nodes=2, time="01:00:00")
>>> [line for line in job_script(job).splitlines() if "--nodes" in line]
['#SBATCH --nodes=2']
>>> [part["kind"] for part in manifests(Pods("train.py", nodes=2, gpus=1))]
['Service', 'NetworkPolicy', 'Job']
>>> any(line.startswith("FROM python") for line in dockerfile().splitlines())
True
>>> def train(job: SlurmJob):
...     Path("job.sh").write_text(job_script(job))
...     return submit(Path("job.sh"), job)
"""

from typing import TYPE_CHECKING

from exogym.core.base.lazy import lazily

__all__ = ["Pods", "SlurmJob", "dockerfile", "job_script", "manifests", "submit"]

if TYPE_CHECKING:
    from exogym.clusters.kubernetes import Pods, dockerfile, manifests
    from exogym.clusters.slurm import SlurmJob, job_script, submit
else:
    __getattr__, __dir__ = lazily(__name__)
