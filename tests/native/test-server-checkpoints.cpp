// sources: server-checkpoints.cpp

#include "server-checkpoints.h"

#include "testing.h"

#include <random>
#include <string>

namespace {

using slot_sizes = std::vector<std::vector<size_t>>;

std::string victims(const server_checkpoints_plan & plan) {
    std::string res;
    for (const auto & [slot, i] : plan.victims) {
        res += (res.empty() ? "" : " ") + std::to_string(slot) + ":" + std::to_string(i);
    }
    return plan.admitted ? res : "not admitted";
}

size_t sum(const slot_sizes & sizes) {
    size_t res = 0;
    for (const auto & slot : sizes) {
        for (const size_t n : slot) {
            res += n;
        }
    }
    return res;
}

}

TEST(no_budget_keeps_everything) {
    CHECK_EQ(victims(server_checkpoints_admit({ { 5, 5 } }, 0, 0, 1000)), std::string(""));
    CHECK_EQ(victims(server_checkpoints_enforce({ { 5, 5 } }, 0, 0)), std::string(""));
}

TEST(what_fits_costs_nothing) {
    CHECK_EQ(victims(server_checkpoints_admit({ { 5, 5 }, {} }, 20, 1, 10)), std::string(""));
    CHECK_EQ(victims(server_checkpoints_enforce({ { 5, 5 }, { 10 } }, 20, 1)), std::string(""));
}

TEST(the_slot_that_holds_the_most_gives_up_its_oldest_after_its_first) {
    CHECK_EQ(victims(server_checkpoints_admit({ { 5, 5, 5 }, { 5, 5 } }, 25, 1, 5)), std::string("0:1"));
    CHECK_EQ(victims(server_checkpoints_admit({ { 5, 5, 5 }, { 5, 5, 5 } }, 30, 1, 5)), std::string("1:1"));
    CHECK_EQ(victims(server_checkpoints_enforce({ { 1, 1, 1, 1 }, { 5, 5 } }, 10, 2)), std::string("1:1"));
    CHECK_EQ(victims(server_checkpoints_enforce({ { 4, 4, 4 }, { 4, 4 } }, 8, 2)), std::string("0:1 0:1 1:1"));
}

TEST(a_slot_makes_room_for_its_own_new_one) {
    CHECK_EQ(victims(server_checkpoints_admit({ { 5, 5, 5 } }, 15, 0, 5)), std::string("0:1"));
    CHECK_EQ(victims(server_checkpoints_admit({ { 5, 5, 5 } }, 15, 0, 10)), std::string("0:1 0:1"));
}

TEST(first_ones_are_not_given_up_for_a_new_one) {
    CHECK_EQ(victims(server_checkpoints_admit({ { 5 }, { 5 } }, 14, 0, 5)), std::string("not admitted"));
    CHECK_EQ(victims(server_checkpoints_admit({ { 5, 4 }, {} }, 14, 1, 10)), std::string("not admitted"));
    CHECK_EQ(victims(server_checkpoints_admit({ { 5, 4 }, {} }, 14, 1, 9)), std::string("0:1"));
    CHECK_EQ(victims(server_checkpoints_admit({ {} }, 4, 0, 5)), std::string("not admitted"));
    CHECK_EQ(victims(server_checkpoints_admit({ {} }, 4, 0, SIZE_MAX)), std::string("not admitted"));
}

TEST(what_came_with_a_state_gives_way_first) {
    CHECK_EQ(victims(server_checkpoints_enforce({ { 5 }, { 5 }, { 5 } }, 10, 1)), std::string("1:0"));
    CHECK_EQ(victims(server_checkpoints_enforce({ { 5 }, { 6 }, { 5 } }, 10, 3)), std::string("1:0"));
    CHECK_EQ(victims(server_checkpoints_enforce({ { 5 }, { 6, 1 } }, 4, 1)), std::string("1:1 1:0 0:0"));
}

TEST(the_budget_holds_and_nothing_goes_without_need) {
    std::mt19937 random(7);

    for (int round = 0; round < 2000; ++round) {
        slot_sizes sizes(1 + random() % 4);
        for (auto & slot : sizes) {
            slot.resize(random() % 5);
            for (auto & n : slot) {
                n = 1 + random() % 20;
            }
        }
        const size_t limit  = 1 + random() % 120;
        const size_t i_slot = random() % sizes.size();
        const size_t n_new  = 1 + random() % 30;

        auto kept = sizes;
        const auto enforced = server_checkpoints_enforce(sizes, limit, i_slot);
        for (const auto & [slot, i] : enforced.victims) {
            CHECK(sum(kept) > limit);
            kept.at(slot).erase(kept.at(slot).begin() + i);
        }
        CHECK(sum(kept) <= limit);

        const auto admitted = server_checkpoints_admit(kept, limit, i_slot, n_new);
        size_t n_firsts = 0;
        for (const auto & slot : kept) {
            n_firsts += slot.empty() ? 0 : slot[0];
        }
        CHECK_EQ(admitted.admitted, n_firsts + n_new <= limit);
        for (const auto & [slot, i] : admitted.victims) {
            CHECK_EQ(i, 1u);
            CHECK(sum(kept) + n_new > limit);
            kept.at(slot).erase(kept.at(slot).begin() + i);
        }
        CHECK(!admitted.admitted || sum(kept) + n_new <= limit);
    }
}
