#pragma once

// The native file system at a pace: see server-pace.h.

#include "server-pace.h"
#include "server-page-os.h"

struct server_page_os_paced final : server_page_os {
    server_page_os_paced(server_page_os & os, server_pace & pace) : os(os), pace(pace) {}

    uint64_t process_id() override { return os.process_id(); }

    result make_dir  (const path & p, bool & made)                                    override { return os.make_dir(p, made); }
    result list      (const path & p, std::vector<server_page_os_entry> & entries)    override { return os.list(p, entries); }
    result look      (const path & p, server_page_os_entry & entry)                   override { return os.look(p, entry); }
    result create    (const path & p, handle & file)                                  override { return os.create(p, file); }
    result open      (const path & p, handle & file, uint64_t & n_bytes)              override { return os.open(p, file, n_bytes); }
    result sync      (const path & p, server_page_os_handle & file)                   override { return os.sync(p, file); }
    result sync_dir  (const path & p)                                                 override { return os.sync_dir(p); }
    result remove    (const path & p)                                                 override { return os.remove(p); }
    result remove_dir(const path & p)                                                 override { return os.remove_dir(p); }
    result lock      (const path & p, server_page_os_lock how, handle & held)         override { return os.lock(p, how, held); }

    result write(const path & p, server_page_os_handle & file, const void * data, size_t size) override {
        result res;
        pace.in_pieces(size, [&](size_t offset, size_t n_bytes) {
            res = os.write(p, file, static_cast<const uint8_t *>(data) + offset, n_bytes);
            // all at once at the end would be one long piece, on a thread of the system's
            if (res.ok() && pace.beside_decoding && (offset + n_bytes) % N_BYTES_SYNC == 0) {
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

    server_page_os & os;
    server_pace    & pace;
};
