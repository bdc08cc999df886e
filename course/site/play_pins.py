"""What the runtime of the pages is made of: versions, and what each archive must be.

The hashes are of the archives as the public indexes have them; a mirror serves the same bytes.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Pin:
    """One archive: `digest` is "sha512-..." in base64 for npm, hexadecimal sha256 for a wheel."""

    name: str
    version: str
    digest: str

    @property
    def npm(self) -> str:
        """The name npm gives the packed archive."""
        return f"{self.name.removeprefix('@').replace('/', '-')}-{self.version}.tgz"


PYODIDE = Pin(
    "pyodide",
    "314.0.3",
    "sha512-sK40My6m8tmBUYtYH9au9rXUeh9x0wfahtHdOlGmJxZDsKBGKtP6KznyFB2+u/klbQTdDionR0uaVd176zVQzQ==",
)
BUNDLER = Pin(
    "esbuild-wasm",
    "0.28.2",
    "sha512-GccVwhv3mmOUVQHCQm2Ox/rby8n/EqUwvZxE6Pjfikrq/lWw9g9WX/u9EykWnpot3Ko6j426DgQdea2xWKIAQA==",
)
EDITOR = (
    Pin(
        "@codemirror/autocomplete",
        "6.20.4",
        "sha512-yF8RhOf2SXlg00+qtupzLhrglcas61boqaONiNcbPIebHCpJocpqTBA6dyrtUrQO47hqyTdeob/3XnYilT7TaQ==",
    ),
    Pin(
        "@codemirror/commands",
        "6.11.1",
        "sha512-O/4hG3SC1YwcmQ0d2UVNDs+AsaNWd1iHVxbTeEBuqH+6bExAiPK3iS/BvpY6rZGURALv4ZD3sIgcCmRvw3ehBg==",
    ),
    Pin(
        "@codemirror/lang-python",
        "6.2.1",
        "sha512-IRjC8RUBhn9mGR9ywecNhB51yePWCGgvHfY1lWN/Mrp3cKuHr0isDKia+9HnvhiWNnMpbGhWrkhuWOc09exRyw==",
    ),
    Pin(
        "@codemirror/language",
        "6.13.1",
        "sha512-zfvU2r3TyylQLMj/te+5CnQ0rSqZi8B1oTCBbQkagcLW4Xc6imab6qN+pEJhsuNOLaJqiRyBXp9UhWA1DhVvDw==",
    ),
    Pin(
        "@codemirror/lint",
        "6.9.8",
        "sha512-qNvtcE73xUto/D1RvtgSRI4A1Hg8ekxlvtZpjHpdpisLBnhyu82EUEJMEgaxkjuQCA8vqnrylENWKOsEDCOHcw==",
    ),
    Pin(
        "@codemirror/merge",
        "6.12.3",
        "sha512-Wq9wXrp41cW/nIpi1CQPyNwD+36kg8KIX676ym0Hyfn3Dpr+XQHNAIsZYVNlaivuVB4SAASbreG3V0VXinbqZA==",
    ),
    Pin(
        "@codemirror/search",
        "6.7.2",
        "sha512-gUYkYhT2+n/+VGZ+8EzE5WFkYZUZYm1VOKDudIsNqh42uRVQJ0a6Yss9sdKT3MeOYfuL1N6AZA57oza0Oyr0LA==",
    ),
    Pin(
        "@codemirror/state",
        "6.7.6",
        "sha512-kAz+AncRtKuIknedxT1bq4XwXv4UowhbkHU1myPrtVb/jZtImWuV5BXzv5vK6i3kYACsdiZiQKFQQ5Mq7elW8w==",
    ),
    Pin(
        "@codemirror/streamparser",
        "6.0.0",
        "sha512-JTFPF6xrfjt0mnfGPgzcLiMwYmvIyNaoizp8BYzv8FE8KrT6GBGDZ190rtt+O7Wke3gG/MFHyiY9YGNeimof4w==",
    ),
    Pin(
        "@codemirror/view",
        "6.43.15",
        "sha512-HHsfpqFeHyXLs983pSRe38Xajs0vFWZQ2BuX0m7Ki8w3jZ5iD8cuR3lBz2/5/X53Dhf32SBHKh6rtSTB6tKeGw==",
    ),
    Pin(
        "@lezer/common",
        "1.5.5",
        "sha512-Pw7PVCndruF1pb3ebCxpSVpkMHSDjwRCLcTRw+RizUKco5QbWylwq2g4lnG/RYN7yTTQDXE9F77MwtkAyphrjg==",
    ),
    Pin(
        "@lezer/highlight",
        "1.2.5",
        "sha512-O1GMVKgtf5YspFaRzpmqkVgMtIk2HG9uMAbH6wdAIdNh3TVzCsch/+cRi+6l2//UGDKe6NB9BW3cvuR5ezMQ0w==",
    ),
    Pin(
        "@lezer/lr",
        "1.4.12",
        "sha512-On9HU4oMMiHPMkQDgoTnGahjgG5n/MkN38CgG77sMraKLL+3JBbeQNi1FcCXV9QRqwF9/BUXP3caHyJC1fBOTQ==",
    ),
    Pin(
        "@lezer/python",
        "1.1.19",
        "sha512-MhQIURHRytsNzP/YXnqpYKW6la6voAH3kyplTOOiCdjyFY6cWWGFVmYVdHIPrElqSDf4iCDktQCockB9FxuhzQ==",
    ),
    Pin(
        "@marijn/find-cluster-break",
        "1.0.4",
        "sha512-Wy0V7+SGUjnF9/TkiM1hKVDPj7jKXduPNboMVtHTA8dySMURWqfg/JZ9E2Sq8JgSJmkl7k7Qe9FLeMSrSraWmQ==",
    ),
    Pin(
        "codemirror",
        "6.0.2",
        "sha512-VhydHotNW5w1UGK0Qj96BwSk/Zqbp9WbnyK2W/eVMv4QyF41INRGpjUhFJY7/uDNuudSc33a/PKr4iDqRduvHw==",
    ),
    Pin(
        "crelt",
        "1.0.7",
        "sha512-aK6BbWfhf4U/wCcLHKPJl/xa6VkVstRaPywWtMKGwuOLc/wZTyQYuoxgvZnNsBvv7Kg3YTBQYYBCggcviQczuA==",
    ),
    Pin(
        "style-mod",
        "4.1.4",
        "sha512-XXWIQt633/EpAFx8aZDOTjBzrCaGmhvEQlQo6MVPfa2OzO2cWo+4hV9h+6UkHYlXGfy+ODXKUdP7Pthmcu5ATw==",
    ),
    Pin(
        "w3c-keyname",
        "2.2.8",
        "sha512-dpojBhNsCNN7T82Tm7k26A6G9ML3NkhDsnw9n/eoxSRlVBB4CEtIQ/KTCLI2Fwf3ataSXRhYFkQi3SlnFwPvPQ==",
    ),
)
"""CodeMirror, and everything it imports."""

CARRIER = Pin(
    "open-webui",
    "0.12.4",
    "02e9caba96234db3fa17a92e56163b3f7f2b8ca8227fa886b85c178d696483f6",
)
"""The one package of an index that has numpy built for this Pyodide, in a folder of its own."""
CARRIED = "open_webui/frontend/pyodide/"
NUMPY = Pin(
    "numpy-2.4.3-cp314-cp314-pyemscripten_2026_0_wasm32.whl",
    "2.4.3",
    "0cad9c1b91f0082e4f959bc0e0bf5835a2efbba6ab3b1e9d1fe6e7e564cca98e",
)
"""The hash is that in Pyodide's own lock file."""
TOOLS = (
    Pin("pytest", "9.0.2", "711ffd45bf766d5264d487b917733b453d917afd2b0ad65223959f59089f875b"),
    Pin("pluggy", "1.7.0", "7dd7b0d8832ba3cb632c306926ded123429211b83641b35dc5c41ad2d34f9bec"),
    Pin("iniconfig", "2.3.1", "9121e2c1fdb355232495be3194c8dfe87ccc2d5dee45947b78e68f499790d7a7"),
    Pin("packaging", "26.3", "d7193f7c8e4e93f444fde0262bf90af30e16fa0ad0ad44cb553c87339b23cd1c"),
    Pin("pygments", "2.21.0", "2363c69b61c4a97c838da3b130dcd6468f4848992b21a82f2a63ec34377137d9"),
    Pin("pyyaml", "6.0.3", "c458b6d084f9b935061bc36216e8a69a7e293a2f1e68bf956dcd9e6cbcd143f5"),
)
"""Wheels; of PyYAML's, which is for another machine, only the files in Python are used."""

RUNTIME_BYTES = 17_600_000
"""What the live engine loads, compressed: runtime, numpy, the course, and the model's 6 MB."""
