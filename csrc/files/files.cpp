#include "files.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/types.h>
#include <unistd.h>

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <system_error>
#include <thread>
#include <unordered_map>
#include <vector>

static_assert(sizeof(off_t) == sizeof(int64_t), "offsets in files have 64 bits");

namespace {

struct Transfer {
    bool writes;
    std::string path;
    int64_t offset;
    char* data;
    int64_t nbytes;
    int64_t outcome = 0;
    bool is_done = false;

    // Bytes moved or minus an errno. The system may move fewer than it was asked for, and be interrupted.
    int64_t run() const {
        const int flags = (writes ? O_WRONLY : O_RDONLY) | O_CLOEXEC;
        int file;
        do file = open(path.c_str(), flags);
        while (file < 0 && errno == EINTR);
        if (file < 0) return -errno;
        int64_t done = 0;
        while (done < nbytes) {
            char* const place = data + done;
            const size_t left = (size_t)(nbytes - done);
            const ssize_t count = writes ? pwrite(file, place, left, offset + done) : pread(file, place, left, offset + done);
            if (count > 0) {
                done += count;
            } else if (count == 0) {
                break;
            } else if (errno != EINTR) {
                done = -errno;
                break;
            }
        }
        // Some file systems report only now that a write failed. The descriptor is gone even after EINTR.
        if (close(file) != 0 && errno != EINTR && writes && done >= 0) done = -errno;
        return done;
    }
};

}  // namespace

struct pa_files {
    std::mutex mutex;
    std::condition_variable wake, done;
    std::deque<Transfer*> waiting;
    std::unordered_map<int64_t, std::unique_ptr<Transfer>> known;
    int64_t last_handle = 0;
    bool ends = false;
    std::vector<std::thread> threads;

    void serve() {
        std::unique_lock<std::mutex> lock(mutex);
        for (;;) {
            wake.wait(lock, [this] { return ends || !waiting.empty(); });
            if (waiting.empty()) return;  // and not before: the end waits for all that was asked for
            Transfer* const transfer = waiting.front();
            waiting.pop_front();
            lock.unlock();
            const int64_t outcome = transfer->run();
            lock.lock();
            transfer->outcome = outcome;
            transfer->is_done = true;
            done.notify_all();
        }
    }
};

extern "C" {

pa_files* pa_files_open(int32_t threads) {
    std::unique_ptr<pa_files> files;
    try {
        files = std::make_unique<pa_files>();
        files->threads.reserve(threads > 0 ? threads : 0);
        for (int32_t i = 0; i < threads; i++) files->threads.emplace_back(&pa_files::serve, files.get());
    } catch (const std::system_error&) {  // fewer do as well
    } catch (const std::bad_alloc&) {
    }
    return files && !files->threads.empty() ? files.release() : nullptr;
}

void pa_files_close(pa_files* files) {
    {
        std::lock_guard<std::mutex> lock(files->mutex);
        files->ends = true;
    }
    files->wake.notify_all();
    for (std::thread& thread : files->threads) thread.join();
    delete files;
}

int64_t pa_files_start(pa_files* files, int32_t writes, const char* path, int64_t offset, void* data, int64_t nbytes) {
    int64_t handle;
    try {
        std::unique_ptr<Transfer> transfer(new Transfer{writes != 0, path, offset, (char*)data, nbytes});
        Transfer* const added = transfer.get();
        std::lock_guard<std::mutex> lock(files->mutex);
        handle = files->last_handle + 1;
        files->waiting.push_back(added);
        try {
            files->known.emplace(handle, std::move(transfer));
        } catch (...) {
            files->waiting.pop_back();
            throw;
        }
        files->last_handle = handle;
    } catch (const std::bad_alloc&) {
        return 0;
    }
    files->wake.notify_one();
    return handle;
}

int32_t pa_files_is_done(pa_files* files, int64_t handle) {
    std::lock_guard<std::mutex> lock(files->mutex);
    const auto found = files->known.find(handle);
    return found == files->known.end() || found->second->is_done;
}

int64_t pa_files_wait(pa_files* files, int64_t handle) {
    std::unique_lock<std::mutex> lock(files->mutex);
    const auto found = files->known.find(handle);
    if (found == files->known.end()) return -EINVAL;
    const Transfer* const transfer = found->second.get();  // stays where it is, whatever the table does meanwhile
    files->done.wait(lock, [transfer] { return transfer->is_done; });
    const int64_t outcome = transfer->outcome;
    files->known.erase(handle);
    return outcome;
}

}  // extern "C"
