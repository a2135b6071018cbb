// An engine for the reconfigure logic: contexts are maps from slot to content, and what may not be is a failed CHECK.

#pragma once

#include "server-reconfigure.h"
#include "testing.h"

#include <algorithm>
#include <functional>
#include <map>
#include <optional>
#include <sstream>
#include <string>

// what each verb takes, so that a phase is told from every other one
static constexpr int64_t T_BUILD_US = 1, T_SYNC_US = 3, T_OUT_US = 5, T_IN_US = 70, T_RELEASE_US = 1100, T_ATTACH_US = 13000, T_COMMIT_US = 170000;

static constexpr int64_t CELL_BYTES = 100;

struct fake_engine : server_reconfigure_engine {
    struct contexts {
        server_geometry                geometry;
        std::map<int32_t, std::string> cells; // slot id -> content
    };
    struct held_state {
        server_state_load load;
        std::string       content; // that must not be lost
    };

    server_geometry         served;
    std::optional<contexts> live, built;
    bool                    attached = false;

    std::vector<held_state>        slots_held, parked_held; // slots_held: one for each slot
    std::map<int32_t, std::string> captured;                // slot id -> content
    int32_t                        n_parked_ever = 0;

    server_geometry_limits lim;
    int64_t memory_total      = 0;     // 0: not known
    bool    no_memory_beside  = false; // a build while other contexts are there fails for want of memory
    bool    forced            = false; // states may be dropped

    // verbs that can fail, in the order of their calls; `fault` is given the verb with the count of its calls, and the count of all
    std::vector<std::string>                                calls;
    std::map<std::string, int>                              n_calls;
    std::vector<std::string>                                failed;
    std::function<bool(const std::string & call, size_t n)> fault = [](const std::string &, size_t) { return false; };

    int64_t now = 1000;

    fake_engine(int64_t n_ctx, int64_t n_seq, bool kv_unified = false) {
        served.n_ctx        = n_ctx;
        served.n_seq        = n_seq;
        served.n_ctx_seq    = kv_unified ? n_ctx : n_ctx / n_seq;
        served.n_ctx_slot   = std::min<int64_t>(served.n_ctx_seq, 8192);
        served.kv_unified   = kv_unified;
        served.cache_type_k = "f16";
        served.cache_type_v = "f16";

        live = contexts{ served, {} };
        make_slots();

        lim.n_batch     = 2048;
        lim.n_seq_max   = 256;
        lim.n_ctx_train = 8192;
        lim.cache_types = { "f16", "q8_0" };
        lim.cell_bytes  = 1;
    }

    void make_slots() {
        slots_held = std::vector<held_state>(live->geometry.n_seq);
        for (size_t i = 0; i < slots_held.size(); ++i) {
            slots_held[i].load.id = i;
        }
    }

    void hold(int32_t id, int64_t n_tokens, bool running = false) {
        auto & slot = slots_held[id];
        slot.load.n_tokens = n_tokens;
        slot.load.n_need   = n_tokens + (running ? 2 : 0);
        slot.load.n_bytes  = n_tokens * CELL_BYTES;
        slot.load.running  = running;
        slot.content       = std::to_string(n_tokens) + " tokens that slot " + std::to_string(id) + " was given";

        live->cells[id] = slot.content;
    }

    bool fails(const std::string & verb) {
        const std::string call = verb + " " + std::to_string(++n_calls[verb]);
        calls.push_back(call);
        if (!fault(call, calls.size())) {
            return false;
        }
        failed.push_back(call);
        return true;
    }

    // all that is held and where, in one line
    std::string told() const {
        std::ostringstream res;
        if (live) {
            res << live->geometry.n_ctx << "/" << live->geometry.n_seq << (live->geometry.kv_unified ? "u" : "") << " " << live->geometry.cache_type_k;
            for (const auto & [id, content] : live->cells) {
                res << ", " << id << ": " << content;
            }
        } else {
            res << "nothing serves";
        }
        for (const auto & state : parked_held) {
            res << ", parked: " << state.content;
        }
        return res.str();
    }

    std::vector<std::string> contents() const {
        std::vector<std::string> res;
        for (const auto * held : { &slots_held, &parked_held }) {
            for (const auto & state : *held) {
                if (state.load.held()) {
                    res.push_back(state.content);
                }
            }
        }
        std::sort(res.begin(), res.end());
        return res;
    }

    // nothing is left of the change, and what serves has what the slots hold
    void check_at_rest() const {
        CHECK(!built && !attached && captured.empty());
        CHECK_EQ(slots_held.size(), live ? (size_t) live->geometry.n_seq : 0u);
        for (const auto & slot : slots_held) {
            CHECK_EQ(live->cells.count(slot.load.id), slot.load.held() ? 1u : 0u);
            CHECK(!slot.load.held() || live->cells.at(slot.load.id) == slot.content);
        }
        CHECK(!live || live->geometry == served);
    }

    static std::vector<server_state_load> loads_of(const std::vector<held_state> & held) {
        std::vector<server_state_load> res;
        for (const auto & state : held) {
            res.push_back(state.load);
        }
        return res;
    }

    static int64_t bytes_of(const std::string & content) { return std::stoll(content) * CELL_BYTES; }

    const held_state & parked_by_id(int32_t id) const {
        const auto it = std::find_if(parked_held.begin(), parked_held.end(), [&](const auto & state) { return state.load.id == id; });
        CHECK(it != parked_held.end());
        return *it;
    }

    const std::string & captured_by_id(int32_t id_slot) const {
        CHECK(captured.count(id_slot) == 1);
        return captured.at(id_slot);
    }

    //
    // what the logic asks
    //

    server_geometry                geometry() const override { return served; }
    bool                           serving()  const override { return live.has_value(); }
    std::vector<server_state_load> slots()    const override { return loads_of(slots_held); }
    std::vector<server_state_load> parked()   const override { return loads_of(parked_held); }
    int64_t                        time_us()  const override { return now; }
    int64_t                        n_weight_loads() const override { return 1; }

    // contexts that serve are full, those that were built take what was put into them
    server_geometry_limits limits() const override {
        auto res = lim;
        res.reclaimable_bytes = live ? live->geometry.n_ctx * CELL_BYTES : 0;
        res.cell_bytes_kv     = CELL_BYTES;

        int64_t n_taken = res.reclaimable_bytes;
        for (const auto & held : { captured, built ? built->cells : std::map<int32_t, std::string>() }) {
            for (const auto & [id, content] : held) {
                n_taken += bytes_of(content);
            }
        }
        for (const auto & state : parked_held) {
            n_taken += state.load.n_bytes;
        }
        CHECK(memory_total == 0 || n_taken <= memory_total); // the process would have been killed
        res.memory_bytes = memory_total > 0 ? std::max<int64_t>(1, memory_total - n_taken) : 0;
        return res;
    }

    server_reconfigure_build build(const server_geometry & next) override {
        CHECK(!built && !attached);
        now += T_BUILD_US;

        server_reconfigure_build res;
        res.no_memory = no_memory_beside && live;
        n_calls["build"] += res.no_memory; // that is no fault
        res.ok        = !res.no_memory && !fails("build");
        res.error     = res.ok ? "" : "injected";
        res.t_us      = T_BUILD_US;
        if (res.ok) {
            res.host_bytes_needed   = next.n_ctx * CELL_BYTES;
            res.bytes_needed["CPU"] = res.host_bytes_needed;
            built = contexts{ next, {} };
        }
        return res;
    }

    bool sync() override {
        CHECK(live || slots_held.empty());
        now += T_SYNC_US;
        return !fails("sync");
    }

    server_reconfigure_move moved(const std::string & verb, const std::string & content, int64_t t_out_us, int64_t t_in_us) {
        now += t_out_us + t_in_us;

        server_reconfigure_move res;
        res.ok      = !fails(verb);
        res.error   = res.ok ? "" : "injected";
        res.n_bytes = bytes_of(content);
        res.t_in_us = t_in_us;
        return res;
    }

    void put(int32_t id_slot, const std::string & content) {
        CHECK(id_slot >= 0 && id_slot < built->geometry.n_seq);
        CHECK(built->cells.emplace(id_slot, content).second); // no slot gets two states
        limits();                                             // and there was memory for it
    }

    server_reconfigure_move move(int32_t id_slot) override {
        CHECK(live && built && !attached && slots_held.at(id_slot).load.held());
        const auto res = moved("move", live->cells.at(id_slot), T_OUT_US, T_IN_US);
        if (res.ok) {
            put(id_slot, live->cells.at(id_slot));
        }
        return res;
    }

    server_reconfigure_move capture(int32_t id_slot) override {
        CHECK(live && slots_held.at(id_slot).load.held());
        const auto res = moved("capture", live->cells.at(id_slot), T_OUT_US, 0);
        if (res.ok) {
            CHECK(captured.emplace(id_slot, live->cells.at(id_slot)).second);
        }
        return res;
    }

    server_reconfigure_move restore(int32_t id_slot) override {
        CHECK(!live && built && !attached);
        const auto res = moved("restore", captured_by_id(id_slot), 0, T_IN_US);
        if (res.ok) {
            put(id_slot, captured_by_id(id_slot));
        }
        return res;
    }

    server_reconfigure_move place(int32_t id_parked, int32_t id_slot) override {
        CHECK(built && !attached);
        const auto & state = parked_by_id(id_parked);
        const auto   res   = moved("place", state.content, 0, T_IN_US);
        if (res.ok) {
            put(id_slot, state.content);
        }
        return res;
    }

    void release() noexcept override {
        CHECK(live && !built);
        for (const auto & slot : slots_held) {
            CHECK(!slot.load.held() || captured_by_id(slot.load.id) == slot.content);
        }
        now += T_RELEASE_US;
        live.reset();
    }

    // every state is where its plan says that it is
    void check_states(const std::vector<server_state_plan> & states, bool stranded) const {
        size_t n_slots = 0, n_parked = 0, n_built = 0;
        for (const auto & state : states) {
            const auto & held = state.was_parked ? parked_by_id(state.load.id) : slots_held.at(state.load.id);
            (state.was_parked ? n_parked : n_slots)++;

            switch (state.fate) {
                case SERVER_STATE_FATE_RESIDENT:
                case SERVER_STATE_FATE_PLACED:
                    CHECK((state.fate == SERVER_STATE_FATE_PLACED) == state.was_parked && !stranded);
                    CHECK_EQ(built->cells.at(state.id_slot), held.content);
                    n_built++;
                    break;
                case SERVER_STATE_FATE_PARKED:
                    CHECK_EQ(state.id_slot, -1);
                    CHECK(state.was_parked || captured_by_id(state.load.id) == held.content);
                    break;
                case SERVER_STATE_FATE_DROPPED:
                    CHECK(forced && !stranded);
                    break;
            }
        }
        CHECK_EQ(n_slots, (size_t) std::count_if(slots_held.begin(), slots_held.end(), [](const auto & slot) { return slot.load.held(); }));
        CHECK_EQ(n_parked, parked_held.size());
        CHECK_EQ(n_built, built ? built->cells.size() : 0u);
    }

    bool attach(const server_geometry & next, const std::vector<server_state_plan> & states, std::string & error) override {
        CHECK(built && built->geometry == next && !attached);
        check_states(states, false);
        now += T_ATTACH_US;
        attached = !fails("attach");
        error = attached ? "" : "injected";
        return attached;
    }

    void park(const server_state_plan & state, const std::string & content) {
        parked_held.push_back({ state.load, content });
        auto & load = parked_held.back().load;
        load.id              = n_parked_ever++;
        load.id_home         = state.load.id;
        load.n_ctx_slot_home = served.n_ctx_slot;
    }

    void commit(const server_geometry & next, const std::vector<server_state_plan> & states) noexcept override {
        CHECK(built && built->geometry == next && attached);
        check_states(states, false);
        now += T_COMMIT_US;

        const auto slots_before  = std::move(slots_held);
        const auto parked_before = std::move(parked_held);
        parked_held.clear();

        live = std::move(built);
        built.reset();
        make_slots();

        for (const auto & state : states) {
            const auto & from = state.was_parked ?
                *std::find_if(parked_before.begin(), parked_before.end(), [&](const auto & held) { return held.load.id == state.load.id; }) :
                slots_before.at(state.load.id);

            if (state.id_slot >= 0) {
                slots_held.at(state.id_slot)         = from;
                slots_held.at(state.id_slot).load.id = state.id_slot;
            } else if (state.fate == SERVER_STATE_FATE_PARKED && state.was_parked) {
                parked_held.push_back(from);
            } else if (state.fate == SERVER_STATE_FATE_PARKED) {
                park(state, from.content);
            }
        }
        served   = next;
        attached = false;
        captured.clear();
    }

    void strand(const std::vector<server_state_plan> & states) noexcept override {
        CHECK(!live && !built);
        check_states(states, true);
        for (const auto & state : states) {
            if (!state.was_parked) {
                park(state, captured_by_id(state.load.id));
            }
        }
        slots_held.clear();
        captured.clear();
    }

    void discard() noexcept override {
        built.reset();
        attached = false;
    }

    void forget() noexcept override {
        CHECK(live || slots_held.empty());
        for (const auto & slot : slots_held) {
            CHECK(!slot.load.held() || live->cells.at(slot.load.id) == slot.content);
        }
        captured.clear();
    }
};

// begin, build, finish, as the server does it
inline server_reconfigure_result reconfigure(fake_engine & engine, const server_geometry_request & request, const std::function<void()> & meanwhile = [] {}) {
    server_reconfigure_plan   plan;
    server_reconfigure_result res;
    engine.forced = request.force;
    if (!server_reconfigure_begin(engine, request, plan, res)) {
        return res;
    }
    const auto built = engine.build(plan.next);
    meanwhile();
    res = server_reconfigure_finish(engine, plan, built);
    engine.check_at_rest();
    return res;
}

inline server_geometry_request ask(std::optional<int64_t> n_ctx, std::optional<int64_t> n_seq = {}, std::optional<bool> kv_unified = {}) {
    server_geometry_request res;
    res.n_ctx      = n_ctx;
    res.n_seq      = n_seq;
    res.kv_unified = kv_unified;
    return res;
}

inline server_geometry_request ask_type(const std::string & cache_type_k, bool force = false) {
    server_geometry_request res;
    res.cache_type_k = cache_type_k;
    res.force        = force;
    return res;
}
