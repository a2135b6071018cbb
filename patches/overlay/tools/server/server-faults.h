#pragma once

// Faults and delays for tests. Without LLAMA_SERVER_FAULTS all of it compiles to nothing.
//
// LLAMA_SERVER_TEST_FAULTS is the path of a file with a line "STEP N" for each fault: the Nth time that STEP is reached within
// one change, it fails. The file is read again for every change. LLAMA_SERVER_TEST_STEP_DELAY_MS makes every step take longer.

#ifdef LLAMA_SERVER_FAULTS

#include <chrono>
#include <cstdlib>
#include <fstream>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>

struct server_faults {
    std::mutex mutex;

    std::set<std::pair<std::string, int>> wanted;
    std::map<std::string, int>            n_reached;

    static server_faults & get() {
        static server_faults res;
        return res;
    }
};

// a change begins: count anew
inline void server_faults_begin() {
    auto & faults = server_faults::get();

    std::lock_guard<std::mutex> lock(faults.mutex);
    faults.wanted.clear();
    faults.n_reached.clear();

    const char * path = std::getenv("LLAMA_SERVER_TEST_FAULTS");
    std::ifstream file(path ? path : "");

    std::string step;
    int         n;
    while (file >> step >> n) {
        faults.wanted.emplace(step, n);
    }
}

// whether the step is to fail now
inline bool server_fault(const char * step) {
    const char * delay = std::getenv("LLAMA_SERVER_TEST_STEP_DELAY_MS");
    if (delay) {
        std::this_thread::sleep_for(std::chrono::milliseconds(std::atoi(delay)));
    }

    auto & faults = server_faults::get();

    std::lock_guard<std::mutex> lock(faults.mutex);
    return faults.wanted.count({ step, ++faults.n_reached[step] }) > 0;
}

#else

inline void server_faults_begin() {}
inline bool server_fault(const char *) { return false; }

#endif
