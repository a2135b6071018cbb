#pragma once

// The pace of long work beside decoding: it is done in pieces, with a rest after each that is longer than the piece took. A
// thread that works without rest takes a core from decoding for a whole time slice, whatever its priority, and the threads that
// decode wait for each other.

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <thread>

struct server_pace {
    static constexpr size_t N_BYTES_PIECE = 256*1024;

    explicit server_pace(bool beside_decoding) : beside_decoding(beside_decoding) {}

    const bool beside_decoding; // false: nobody is disturbed, so there is no rest

    // after each piece
    void rest() {
        if (!beside_decoding) {
            return;
        }
        const auto took = clock::now() - t_piece;
        std::this_thread::sleep_for(std::clamp<clock::duration>(N_RESTS*took, std::chrono::microseconds(200), std::chrono::milliseconds(10)));
        t_piece = clock::now();
    }

    // work(offset, n_bytes) for each piece of so many bytes; ends early where it returns false, and returns that
    template <typename F>
    bool in_pieces(size_t n_bytes, const F & work) {
        t_piece = clock::now();
        for (size_t offset = 0; offset < n_bytes; offset += N_BYTES_PIECE) {
            if (!work(offset, std::min(N_BYTES_PIECE, n_bytes - offset))) {
                return false;
            }
            rest();
        }
        return true;
    }

private:
    using clock = std::chrono::steady_clock;

    static constexpr int N_RESTS = 3; // so a piece may take a quarter of one core

    clock::time_point t_piece = clock::now();
};
