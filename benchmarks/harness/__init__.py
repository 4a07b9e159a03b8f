"""The means to measure: ranks, turns, the clock, statistics, and rows that can be read without their run."""
