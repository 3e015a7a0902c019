"""Measurements that several benchmark programs share."""
