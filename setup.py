"""The build: `experiments/` and `configs/` travel inside the package, so that an installed wheel has them.

Everything else stands in pyproject.toml. Results stay behind: they are of the checkout.
"""

from setuptools import find_packages, setup

SHIPPED = {"pagedjax.shipped.experiments": "experiments", "pagedjax.shipped.configs": "configs"}

setup(
    packages=[*find_packages(include=["pagedjax*"]), *SHIPPED],
    package_dir=SHIPPED,
    package_data={
        "pagedjax": [
            "kernels/native.cc",
            "kernels/*.h",
            "kernels/tuning.toml",
            "py.typed",
            "report/web/*",
            "explore/web/*",
        ],
        "pagedjax.shipped.configs": ["**/*.toml", "**/*.json"],
    },
)
