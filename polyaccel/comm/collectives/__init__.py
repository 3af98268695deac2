"""The parts that communicators are made of: direct messages, sums in rank order, scratch memory, a group of one."""
