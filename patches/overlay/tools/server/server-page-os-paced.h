#pragma once

// The native file system at a pace: see server-pace.h.

#include "server-pace.h"
#include "server-page-os-behind.h"

struct server_page_os_paced final : server_page_os_behind {
    server_page_os_paced(server_page_os & os, server_pace & pace) : server_page_os_behind(os), pace(pace) {}

    result create(const path & p, handle & file) override {
        n_unsynced = 0;
        return os.create(p, file);
    }

    result write(const path & p, server_page_os_handle & file, const void * data, size_t size) override {
        result res;
        pace.in_pieces(size, [&](size_t offset, size_t n_bytes) {
            res = os.write(p, file, static_cast<const uint8_t *>(data) + offset, n_bytes);
            // all at once at the end would be one long piece, on a thread of the system's
            n_unsynced += n_bytes;
            if (res.ok() && pace.beside_decoding && n_unsynced >= N_BYTES_SYNC) {
                n_unsynced = 0;
                res = os.sync(p, file);
            }
            return res.ok();
        });
        return res;
    }

    // what is replaced leaves memory beforehand, for the rename itself is one piece
    result rename(const path & from, const path & to) override {
        handle   file;
        uint64_t n_bytes = 0;
        if (pace.beside_decoding && os.open(to, file, n_bytes).ok()) {
            pace.in_pieces(n_bytes, [&](size_t offset, size_t n) {
                server_page_os_uncache(*file, offset, n);
                return true;
            });
            file.reset();
        }
        return os.rename(from, to);
    }

    result read(const path & p, server_page_os_handle & file, void * data, size_t size) override {
        result res;
        pace.in_pieces(size, [&](size_t offset, size_t n_bytes) {
            return (res = os.read(p, file, static_cast<uint8_t *>(data) + offset, n_bytes)).ok();
        });
        return res;
    }

private:
    static constexpr size_t N_BYTES_SYNC = 16*server_pace::N_BYTES_PIECE;

    server_pace & pace;

    size_t n_unsynced = 0; // bytes of the file that is written
};
