"""Inputs of a click-through model from MovieLens ratings: 26 id slots and 13 dense numbers.

Ids are positions in one shared range: each slot has a block of its own, sized by the tables or by
fixed buckets.  Dense inputs are statistics of other ratings: for a held-out sample those of all
training samples, for a training sample those of the training samples in the other 4 of 5 folds.
So a sample's own label is in none of its inputs, and both sets have inputs of the same kind.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mpifleet.data.samples import Samples

__all__ = ["LIKED", "NUM_FOLDS", "Ratings", "build_samples"]

LIKED = 4  # the smallest rating with label 1
NUM_FOLDS = 5
AGE_EDGES = np.array([18, 25, 35, 45, 50, 56])
YEAR_EDGES = np.array(
    [1, 1940, 1950, 1960, 1970, 1975, 1980, 1985, 1990, 1992, 1993, 1994, 1995, 1996, 1997, 1998]
)
ERA_EDGES = np.array([1960, 1970, 1980, 1990, 1994, 1996])
NUM_AGES, NUM_YEARS, NUM_ERAS = len(AGE_EDGES) + 1, len(YEAR_EDGES) + 1, len(ERA_EDGES) + 1
GENRE_SLOTS = 6  # no film has more
NUM_WEEKS = 64
DAY_S, HOUR_S = 86_400, 3_600

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


class Ratings(NamedTuple):
    """Ratings [n] with the user and the film of each, and columns of users and of films."""

    user: Ints
    film: Ints
    rating: Ints
    time_s: Ints
    user_age: Ints
    user_gender: NDArray[np.str_]
    user_occupation: NDArray[np.str_]
    user_zip: NDArray[np.str_]
    film_year: Ints  # 0 where unknown
    film_genres: NDArray[np.str_]  # names separated by blanks


def build_samples(ratings: Ratings, train: Ints, test: Ints) -> tuple[Samples, Samples, int]:
    """Samples of the ratings at `train` and at `test`, and the number of ids in use."""
    labels = (ratings.rating >= LIKED).astype(np.int64)
    ids, num_ids = _ids(ratings)
    dense = np.empty((labels.size, 13), np.float32)
    statistics = _Statistics(ratings)
    dense[test] = statistics.dense(fit=train, at=test)
    fold = np.arange(train.size) % NUM_FOLDS  # train is in random order
    for held_out in range(NUM_FOLDS):
        inside = fold == held_out
        dense[train[inside]] = statistics.dense(fit=train[~inside], at=train[inside])
    samples = Samples(labels, dense, ids)
    return samples.rows(train), samples.rows(test), num_ids


def _ids(ratings: Ratings) -> tuple[Ints, int]:
    user, film = ratings.user, ratings.film
    num_users, num_films = ratings.user_age.size, ratings.film_year.size
    age = np.digitize(ratings.user_age, AGE_EDGES)[user]
    gender, num_genders = _codes(ratings.user_gender)
    occupation, num_occupations = _codes(ratings.user_occupation)
    zip_1, num_zip_1 = _codes(ratings.user_zip.astype("U1"))
    zip_2, num_zip_2 = _codes(ratings.user_zip.astype("U2"))
    era = np.digitize(ratings.film_year, ERA_EDGES)[film]
    genres, num_genres = _genre_slots(ratings.film_genres)
    first, second = genres[film, 0], genres[film, 1]
    week = np.minimum((ratings.time_s - ratings.time_s.min()) // (7 * DAY_S), NUM_WEEKS - 1)
    slots = [
        (user, num_users),
        (film, num_films),
        (age, NUM_AGES),
        (gender[user], num_genders),
        (occupation[user], num_occupations),
        (zip_1[user], num_zip_1),
        (zip_2[user], num_zip_2),
        (np.digitize(ratings.film_year, YEAR_EDGES)[film], NUM_YEARS),
        *((genres[film, slot], num_genres) for slot in range(GENRE_SLOTS)),
        (gender[user] * num_genres + first, num_genders * num_genres),
        (age * num_genres + first, NUM_AGES * num_genres),
        (occupation[user] * num_genres + first, num_occupations * num_genres),
        (user * num_genres + first, num_users * num_genres),
        (user * num_genres + second, num_users * num_genres),
        (user * NUM_ERAS + era, num_users * NUM_ERAS),
        (film * num_genders + gender[user], num_films * num_genders),
        (film * NUM_AGES + age, num_films * NUM_AGES),
        (ratings.time_s // HOUR_S % 24, 24),
        (ratings.time_s // DAY_S % 7, 7),
        (week, NUM_WEEKS),
        (gender[user] * NUM_AGES + age, num_genders * NUM_AGES),
    ]
    sizes = np.array([size for _, size in slots])
    starts = np.cumsum(sizes) - sizes
    return np.stack([codes for codes, _ in slots], axis=1) + starts, int(sizes.sum())


def _codes(values: NDArray[np.str_]) -> tuple[Ints, int]:
    names, codes = np.unique(values, return_inverse=True)
    return codes, names.size


def _genre_slots(film_genres: NDArray[np.str_]) -> tuple[Ints, int]:
    """Genre number of each film's 1st, 2nd, ... genre, int64 [films, GENRE_SLOTS], and their count.

    The last number stands for "no further genre".
    """
    film = np.repeat(np.arange(film_genres.size), np.char.count(film_genres, " ") + 1)
    genre, num_names = _codes(np.array(" ".join(film_genres.tolist()).split(" ")))
    place = np.arange(film.size) - np.searchsorted(film, film)
    slots = np.full((film_genres.size, GENRE_SLOTS), num_names, np.int64)
    kept = place < GENRE_SLOTS
    slots[film[kept], place[kept]] = genre[kept]
    return slots, num_names + 1


class _Statistics:
    """Dense inputs of some ratings from other ratings."""

    def __init__(self, ratings: Ratings) -> None:
        self._ratings = ratings
        user, film = ratings.user, ratings.film
        self._num_users, self._num_films = ratings.user_age.size, ratings.film_year.size
        self._era = np.digitize(ratings.film_year, ERA_EDGES)[film]
        self._age = np.digitize(ratings.user_age, AGE_EDGES)[user]
        self._gender, self._num_genders = _codes(ratings.user_gender)
        self._genres, self._num_genres = _genre_slots(ratings.film_genres)
        days, day = np.unique(ratings.time_s // DAY_S, return_inverse=True)
        self._day, self._num_days = day, days.size
        start_s = np.full(self._num_users, np.iinfo(np.int64).max)
        np.minimum.at(start_s, user, ratings.time_s)
        self._hours_since_start = (ratings.time_s - start_s[user]) / HOUR_S

    def dense(self, fit: Ints, at: Ints) -> Floats:
        """Inputs [at, 13] of the ratings `at` from the ratings `fit`; no rating is in both.

        A mean over few ratings is shrunk towards the mean of all: sum / (count + weight).
        The scale of each input is near 1.
        """
        user, film = self._ratings.user, self._ratings.film
        rating = self._ratings.rating.astype(np.float64)
        users, films, genders = self._num_users, self._num_films, self._num_genders
        liked = (rating >= LIKED) - np.mean(rating[fit] >= LIKED)
        rating -= rating[fit].mean()
        film_mean, film_count = _shrunk_mean(film, films, rating, fit, 5.0)
        user_mean, user_count = _shrunk_mean(user, users, rating, fit, 5.0)
        user_bias, _ = _shrunk_mean(user, users, rating - film_mean, fit, 5.0)
        baseline = film_mean + user_bias
        rest = rating - baseline

        def rest_by(key: Ints, size: int, weight: float) -> Floats:
            return _shrunk_mean(key, size, rest, fit, weight)[0]

        columns = [
            baseline,
            user_mean,
            film_mean,
            2.0 * _shrunk_mean(film, films, liked, fit, 5.0)[0],
            2.0 * _shrunk_mean(user, users, liked, fit, 5.0)[0],
            np.log1p(user_count) / 5.0 - 0.8,
            np.log1p(film_count) / 5.0 - 0.8,
            2.0 * self._user_genre(rest, fit),
            2.0 * rest_by(user * self._num_days + self._day, users * self._num_days, 5.0),
            2.0 * rest_by(film * genders + self._gender[user], films * genders, 8.0),
            2.0 * rest_by(film * NUM_AGES + self._age, films * NUM_AGES, 8.0),
            2.0 * rest_by(user * NUM_ERAS + self._era, users * NUM_ERAS, 5.0),
            np.log1p(self._hours_since_start) / 5.0 - 0.3,
        ]
        return np.stack([column[at] for column in columns], axis=1)

    def _user_genre(self, rest: Floats, fit: Ints) -> Floats:
        """What the user rates the genres of this film above the baseline, their mean."""
        user = self._ratings.user
        slots = self._genres[self._ratings.film]
        size = self._num_users * self._num_genres
        keys = user[:, None] * self._num_genres + slots
        known = slots != self._num_genres - 1
        rated = keys[fit][known[fit]]
        sums = np.bincount(rated, np.repeat(rest[fit], known[fit].sum(axis=1)), size)
        means = sums / (np.bincount(rated, minlength=size) + 8.0)
        return np.where(known, means[keys], 0.0).sum(axis=1) / np.maximum(known.sum(axis=1), 1)


def _shrunk_mean(
    key: Ints, size: int, value: Floats, fit: Ints, weight: float
) -> tuple[Floats, Floats]:
    """Per rating, of the ratings `fit` with its key: sum of `value` / (count + weight), count."""
    sums = np.bincount(key[fit], value[fit], size)
    counts = np.bincount(key[fit], minlength=size).astype(np.float64)
    return (sums / (counts + weight))[key], counts[key]
