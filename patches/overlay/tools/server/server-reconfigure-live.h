#pragma once

// A reconfigure of the running server: server_reconfigure_engine on top of server_context, the states that are parked, and
// the thread that builds and frees contexts beside it.

#include "server-common.h"
#include "server-live-info.h"
#include "server-reconfigure.h"
#include "server-slot-page.h"

#include "common.h"
#include "sampling.h"
#include "speculative.h"

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

struct server_context_impl;
struct server_slot;
struct server_task;

// the contexts of one geometry
// note: the order matters because the members are destroyed bottom-to-top: what refers to the draft, the draft, the target
struct server_context_set {
    std::vector<common_sampler_ptr> samplers; // of running generations, by slot id; nullptr: the slot keeps the one it has

    common_init_context_ptr tgt;
    llama_context_ptr       dft;
    common_speculative_ptr  spec;
};

// all members but info() and build() are for the thread that runs the slots
struct server_reconfigure_live final : server_reconfigure_engine {
    explicit server_reconfigure_live(server_context_impl & srv);
    ~server_reconfigure_live() override;

    std::shared_ptr<const server_live_info> info() const; // any thread

    void on_load();                         // the model was loaded
    void on_unload();                       // the model is about to be freed: nothing may refer to it afterwards
    void on_request(server_task && task);   // POST /reconfigure
    void on_built();                        // the build of the pending change has ended

    // parked states
    int           n_requests_parked() const;                        // that have not ended
    bool          keeps_awake() const;                              // a parked request waits, or nothing serves
    bool          cancel_parked(int id_task);                       // its client is gone; false: none is of that task
    int           end_parked(const std::string & error);            // all requests; their states are pages like others then
    server_slot * find_parked(const std::string & cmpl_id) const;   // of a running completion
    json          parked_slots() const;                             // for /slots
    void          forget_parked(const std::string & name);          // its page is used or dropped
    void          prepare_adopt(const std::shared_ptr<server_page> & page, const server_slot & from, int32_t id_home);
    void          adopt();                                          // what was prepared is parked from here on

    bool has_draft() const;

    // make memory resident in the contexts that serve, beside decoding, then call `done` on the worker's thread
    // returns false, and does nothing, while a change is under way
    bool prefault_beside(int32_t id_slot, uint32_t n_cells, const std::function<void()> & done);

    void count_bad_request(); // any thread
    void update_info(const std::function<void(server_live_info &)> & update);

    // server_reconfigure_engine
    server_geometry                geometry() const override;
    bool                           serving()  const override;
    server_geometry_limits         limits()   const override;
    std::vector<server_state_load> slots()    const override;
    std::vector<server_state_load> parked()   const override;
    int64_t                        time_us()  const override;
    int64_t                        n_weight_loads() const override;

    server_reconfigure_build build(const server_geometry & next) override; // worker thread
    bool                     sync() override;
    server_reconfigure_move  move   (int32_t id_slot) override;
    server_reconfigure_move  capture(int32_t id_slot) override;
    server_reconfigure_move  restore(int32_t id_slot) override;
    server_reconfigure_move  place  (int32_t id_parked, int32_t id_slot) override;
    void                     release() noexcept override;
    bool                     attach(const server_geometry & next, const std::vector<server_state_plan> & states, std::string & error) override;
    void                     commit(const server_geometry & next, const std::vector<server_state_plan> & states) noexcept override;
    void                     strand(const std::vector<server_state_plan> & states) noexcept override;
    void                     discard() noexcept override;
    void                     forget()  noexcept override;

private:
    struct parked_slot;
    struct prefault_job;
    struct state;
    std::unique_ptr<state> st;

    server_context_impl & srv;

    prefault_job plan_prefault() const;
    void         prefault(const prefault_job & job); // worker thread
    void         publish_parked();
    void         count(const server_reconfigure_result & result);
    void         answer(int id_task, server_reconfigure_result && result);
    void         finish_beside(server_reconfigure_result && result);
    void         retire(server_context_set && set) noexcept;

    void prepare_park(const server_state_plan & state);
    void unprepare_park() noexcept;
    void park(const server_state_plan & state) noexcept;
    void drop(server_slot & slot) noexcept;
    parked_slot * find(int32_t id_parked) const;
};
