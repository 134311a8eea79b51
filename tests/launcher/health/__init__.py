"""Tests of what is waited for, and how long."""
