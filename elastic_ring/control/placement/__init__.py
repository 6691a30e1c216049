"""Who stands where: members, copies, heals, failure domains, GPUs."""
