#pragma once

// A file system behind another one, as it is: who changes some of its verbs derives from this.

#include "server-page-os.h"

struct server_page_os_behind : server_page_os {
    explicit server_page_os_behind(server_page_os & os) : os(os) {}

    uint64_t process_id() override { return os.process_id(); }

    result make_dir  (const path & p, bool & made)                                                  override { return os.make_dir(p, made); }
    result list      (const path & p, std::vector<server_page_os_entry> & entries)                  override { return os.list(p, entries); }
    result look      (const path & p, server_page_os_entry & entry)                                 override { return os.look(p, entry); }
    result create    (const path & p, handle & file)                                                override { return os.create(p, file); }
    result open      (const path & p, handle & file, uint64_t & n_bytes)                            override { return os.open(p, file, n_bytes); }
    result write     (const path & p, server_page_os_handle & file, const void * data, size_t size) override { return os.write(p, file, data, size); }
    result read      (const path & p, server_page_os_handle & file, void * data, size_t size)       override { return os.read(p, file, data, size); }
    result sync      (const path & p, server_page_os_handle & file)                                 override { return os.sync(p, file); }
    result sync_dir  (const path & p)                                                               override { return os.sync_dir(p); }
    result rename    (const path & from, const path & to)                                           override { return os.rename(from, to); }
    result remove    (const path & p)                                                               override { return os.remove(p); }
    result remove_dir(const path & p)                                                               override { return os.remove_dir(p); }
    result lock      (const path & p, server_page_os_lock how, handle & held)                       override { return os.lock(p, how, held); }

    server_page_os & os;
};
