#include "server-checkpoints.h"

#include <algorithm>
#include <numeric>

using slot_sizes = std::vector<std::vector<size_t>>;

static size_t sum(const std::vector<size_t> & sizes) {
    return std::accumulate(sizes.begin(), sizes.end(), size_t(0));
}

static size_t sum(const slot_sizes & sizes) {
    return std::accumulate(sizes.begin(), sizes.end(), size_t(0), [](size_t n, const auto & slot) { return n + sum(slot); });
}

// the slot with the most bytes among those that have more than n_kept; sizes.size(): there is none
// i_new: the last one of this slot is new and does not count as one that it could give up
static size_t largest(const slot_sizes & sizes, size_t n_kept, size_t i_new) {
    size_t res = sizes.size();

    for (size_t i = 0; i < sizes.size(); ++i) {
        const size_t n = sizes[i].size() - (i == i_new ? 1 : 0);
        if (n > n_kept && (res == sizes.size() || sum(sizes[i]) > sum(sizes[res]))) {
            res = i;
        }
    }

    return res;
}

static void give_up(slot_sizes & sizes, size_t i_slot, size_t i, server_checkpoints_plan & plan) {
    sizes[i_slot].erase(sizes[i_slot].begin() + i);
    plan.victims.emplace_back(i_slot, i);
}

server_checkpoints_plan server_checkpoints_admit(slot_sizes sizes, size_t limit, size_t i_slot, size_t n_bytes) {
    server_checkpoints_plan res;

    if (limit == 0) {
        return res;
    }

    size_t n_firsts = 0; // bytes that are not given up
    for (const auto & slot : sizes) {
        n_firsts += slot.empty() ? 0 : slot.front();
    }
    if (n_bytes > limit || n_firsts > limit - n_bytes) {
        res.admitted = false;
        return res;
    }

    sizes[i_slot].push_back(n_bytes);

    while (sum(sizes) > limit) {
        give_up(sizes, largest(sizes, 1, i_slot), 1, res);
    }

    return res;
}

server_checkpoints_plan server_checkpoints_enforce(slot_sizes sizes, size_t limit, size_t newcomer) {
    server_checkpoints_plan res;

    if (limit == 0) {
        return res;
    }

    while (sum(sizes) > limit) {
        size_t i = largest(sizes, 1, sizes.size());
        if (i < sizes.size()) {
            give_up(sizes, i, 1, res);
            continue;
        }

        i = newcomer < sizes.size() && !sizes[newcomer].empty() ? newcomer : largest(sizes, 0, sizes.size());
        give_up(sizes, i, 0, res);
    }

    return res;
}
