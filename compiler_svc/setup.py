"""Packages every folder below this one, so that a new model family needs no entry in any list."""

from setuptools import find_packages, setup

setup(packages=["compiler_svc", *(f"compiler_svc.{package}" for package in find_packages())])
