#pragma once

// A reconfigure of the running server: server_reconfigure_engine on top of server_context, and the thread that builds and
// frees contexts beside it.

#include "server-reconfigure.h"
#include "server-slot-page.h"

#include "common.h"
#include "sampling.h"
#include "speculative.h"

#include <memory>
#include <string>
#include <utility>
#include <vector>

struct server_context_impl;
struct server_task;

// what other threads may know about the geometry: a snapshot that is replaced as a whole
struct server_live_info {
    server_geometry geometry;

    int64_t n_weight_loads = 0;

    std::shared_ptr<const server_reconfigure_result> last_reconfigure; // nullptr before the first one that was applied
};

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

    // server_reconfigure_engine
    server_geometry               geometry() const override;
    server_geometry_limits        limits()   const override;
    std::vector<server_slot_load> slots()    const override;
    int64_t                       time_us()  const override;
    int64_t                       n_weight_loads() const override;

    server_reconfigure_build build(const server_geometry & next) override; // worker thread
    bool                     sync() override;
    server_reconfigure_move  move(int32_t id_slot) override;
    bool                     attach(std::string & error) override;
    void                     commit(const server_geometry & next) noexcept override;
    void                     discard() noexcept override;

private:
    struct state;
    std::unique_ptr<state> st;

    server_context_impl & srv;

    void prefault(const std::vector<std::pair<llama_seq_id, uint32_t>> & cells, size_t n_bytes_page); // worker thread
    void publish(const server_geometry & geometry, std::shared_ptr<const server_reconfigure_result> last);
    void answer(int id_task, server_reconfigure_result && result);
    void retire(server_context_set && set) noexcept;
};
