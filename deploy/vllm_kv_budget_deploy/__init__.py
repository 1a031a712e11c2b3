# SPDX-License-Identifier: Apache-2.0
"""Budgets and cores for the stages of a vllm-omni deploy file, by vLLM's planner."""
