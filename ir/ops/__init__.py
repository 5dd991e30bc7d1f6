"""ir/ops"""
