#pragma once

// One budget of bytes over the context checkpoints of all slots: which have to go. No llama.h.
//
// The slot that holds the most bytes gives up its oldest checkpoint after its first. The first one of a conversation is what
// requests that begin alike share, so it is kept as long as there is another one to give up.

#include <cstddef>
#include <utility>
#include <vector>

struct server_checkpoints_plan {
    bool admitted = true; // false: the new one has no place, nothing is given up for it

    std::vector<std::pair<size_t, size_t>> victims; // slot and index in its list, in the order in which they go
};

// room for one more of n_bytes in slot i_slot; `sizes`: of each slot's checkpoints in bytes, oldest first; limit 0: no budget
server_checkpoints_plan server_checkpoints_admit(std::vector<std::vector<size_t>> sizes, size_t limit, size_t i_slot, size_t n_bytes);

// what has to go where checkpoints have come with a state; first ones go too, those of the newcomer before those of the others
// newcomer: sizes.size() or more: none
server_checkpoints_plan server_checkpoints_enforce(std::vector<std::vector<size_t>> sizes, size_t limit, size_t newcomer);
